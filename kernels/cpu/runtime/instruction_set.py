"""The instructions of this CPU that the kernels use."""

from dataclasses import dataclass
from enum import Enum

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from numba.core import config


class Dot(Enum):
    """How pairs of bfloat16 are multiplied and summed in float32."""

    WIDENED = "each bfloat16 becomes a float32 first"
    NATIVE = "by one instruction"
    EMULATED = "as by that instruction, without it"


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


def detect() -> Instructions | None:
    """The best that this CPU has; None: it lacks fused multiply-add of vectors.

    Where ``NUMBA_CPU_FEATURES`` tells numba to compile for fewer, the best of those.
    """
    if config.CPU_FEATURES is not None:
        named = config.CPU_FEATURES.split(",")
        return choose({name[1:] for name in named if name.startswith("+")})
    return choose({name for name, has in llvm.get_host_cpu_features().items() if has})


def best_dot() -> Dot:
    """How attention multiplies bfloat16 on this CPU."""
    found = detect()
    return Dot.WIDENED if found is None else found.dot


def choose(features: set[str]) -> Instructions | None:
    """The best for a CPU with these features, by LLVM's names."""
    if {"avx512f", "avx512bf16", "avx512vl"} <= features:
        int8_dot = "avx512vnni" in features
        return Instructions("avx512_bf16", wide=True, dot=Dot.NATIVE, int8_dot=int8_dot)
    if "avx512f" in features:
        return Instructions("avx512", wide=True, dot=Dot.WIDENED)
    if {"avx2", "fma"} <= features:
        return Instructions("avx2", wide=False, dot=Dot.WIDENED)
    if "neon" in features:
        return Instructions("neon", wide=False, dot=Dot.WIDENED)
    return None
