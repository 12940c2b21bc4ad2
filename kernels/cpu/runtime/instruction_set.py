"""The instructions of this CPU that the kernels use."""

import logging
import os
from dataclasses import dataclass
from enum import Enum
from functools import cache

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from numba.core import config

from kernels.cpu.runtime import amx_permission

EMULATE = "EMULATED_INSTRUCTIONS"
"""Environment variable: instructions that are emulated, by their names; for tests."""

logger = logging.getLogger(__name__)


class Dot(Enum):
    """How pairs of bfloat16 are multiplied and summed in float32."""

    WIDENED = "each bfloat16 becomes a float32 first"
    NATIVE = "by one instruction"
    EMULATED = "as by that instruction, without it"
    AMX = "by tiles"
    EMULATED_AMX = "as by tiles, without them"

    @property
    def of_pairs(self) -> bool:
        """Whether nothing is widened, so that decodes and chunks have the same bits."""
        return self is not Dot.WIDENED

    @property
    def by_amx(self) -> bool:
        """Whether it is by tiles, or as by tiles."""
        return self in (Dot.AMX, Dot.EMULATED_AMX)


@dataclass(frozen=True, slots=True)
class Instructions:
    """Instructions that kernels are compiled for.

    Attributes:
        name: for the log.
        wide: 32 registers of sixteen lanes, instead of 16 of eight.
        dot: how bfloat16 is multiplied; inputs in float32 are never rounded to it.
        int8_dot: whether one instruction multiplies and sums four bytes.
    """

    name: str
    wide: bool
    dot: Dot
    int8_dot: bool = False


EMULATED = {
    "avx512_bf16": Instructions("emulated avx512_bf16", wide=True, dot=Dot.EMULATED),
    "amx": Instructions("emulated amx", wide=True, dot=Dot.EMULATED_AMX),
}
"""By the names of what they emulate."""


def detect() -> Instructions | None:
    """The best that this CPU has; None: it lacks fused multiply-add of vectors.

    Where ``NUMBA_CPU_FEATURES`` tells numba to compile for fewer, the best of those; where
    ``EMULATED_INSTRUCTIONS`` names instructions, their emulation.

    Raises:
        ValueError: there is no emulation of that name.
    """
    emulated = os.environ.get(EMULATE)
    if emulated:
        if emulated not in EMULATED:
            raise ValueError(f"{EMULATE}={emulated}; expected one of {', '.join(EMULATED)}")
        return EMULATED[emulated]
    if config.CPU_FEATURES is not None:
        named = config.CPU_FEATURES.split(",")
        features = {name[1:] for name in named if name.startswith("+")}
    else:
        features = {name for name, has in llvm.get_host_cpu_features().items() if has}
    if features >= amx_permission.FEATURES and not _may_use_amx():
        features -= amx_permission.FEATURES
    return choose(features)


@cache
def _may_use_amx() -> bool:
    """Whether this process may use AMX; logged once if not."""
    refused = amx_permission.permission_refused()
    if refused is not None:
        logger.warning("AMX was not permitted", extra={"fields": {"because": refused}})
    return refused is None


def best_dot() -> Dot:
    """How attention multiplies bfloat16 on this CPU."""
    found = detect()
    return Dot.WIDENED if found is None else found.dot


def choose(features: set[str]) -> Instructions | None:
    """The best for a CPU with these features, by LLVM's names."""
    if {"avx512f", "avx512bf16", "avx512vl"} <= features:
        int8_dot = "avx512vnni" in features
        if features >= amx_permission.FEATURES:
            return Instructions("amx", wide=True, dot=Dot.AMX, int8_dot=int8_dot)
        return Instructions("avx512_bf16", wide=True, dot=Dot.NATIVE, int8_dot=int8_dot)
    if "avx512f" in features:
        return Instructions("avx512", wide=True, dot=Dot.WIDENED)
    if {"avx2", "fma"} <= features:
        return Instructions("avx2", wide=False, dot=Dot.WIDENED)
    if "neon" in features:
        return Instructions("neon", wide=False, dot=Dot.WIDENED)
    return None
