"""Which instructions of this CPU the kernels of linear layers use."""

from dataclasses import dataclass

import llvmlite.binding as llvm  # type: ignore[import-untyped]


@dataclass(frozen=True, slots=True)
class Instructions:
    """What the kernels are compiled for.

    Attributes:
        name: for the log.
        wide: 32 registers of sixteen lanes, instead of 16 of eight.
        dot_bfloat16: products of pairs of bfloat16 are summed in float32 by one instruction.
    """

    name: str
    wide: bool
    dot_bfloat16: bool


def detect() -> Instructions | None:
    """The best that this CPU has; None if it lacks fused multiply-add in vectors."""
    return choose(set(name for name, has in llvm.get_host_cpu_features().items() if has))


def choose(features: set[str]) -> Instructions | None:
    """The best for a CPU with these features, by LLVM's names."""
    if {"avx512f", "avx512bf16", "avx512vl"} <= features:
        return Instructions("avx512_bf16", wide=True, dot_bfloat16=True)
    if "avx512f" in features:
        return Instructions("avx512", wide=True, dot_bfloat16=False)
    if {"avx2", "fma"} <= features:
        return Instructions("avx2", wide=False, dot_bfloat16=False)
    if "neon" in features:
        return Instructions("neon", wide=False, dot_bfloat16=False)
    return None
