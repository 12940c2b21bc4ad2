"""Compiles CPU kernels into numba's cache: ``python -m gpu_worker.startup.warm``.

A machine image, or a layer of a Docker image, may carry the cache, so that no start compiles. The
cache is in NUMBA_CACHE_DIR, else where ``scripts/serve`` has it. Its keys have the name and the
features of the CPU, so that on another CPU kernels are compiled as if there
were no cache. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, in the environment of this program and of the
worker, name a CPU that several machines have all instructions of. Of the kernels for quantized
weights, those for int8 and int4 of ``--quantization`` and for the usual checkpoints are compiled.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shared.kernel_cache import KERNEL_CACHE, kernel_cache

if TYPE_CHECKING:
    import torch

    from kernels.cpu.runtime.instruction_set import Instructions

_Load = tuple[str, Callable[[], object]]

# Bits of a code, whether weights have minimums, and whether rows of inputs are rounded as a whole.
# Kernels of formats that are equal in these are the same: those of int8 serve W8A16.
_WEIGHTS = {
    "int8": (8, False, False),
    "int4": (4, True, False),
    "W8A8": (8, False, True),
    "W4A16": (4, False, False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what the cache lacks, with a line for each kernel; returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_worker.startup.warm",
        description=(__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=("float32", "bfloat16"),
        help="Type of models, may be repeated; by default both where the CPU multiplies bfloat16, "
        "else float32, which such a CPU takes for all models.",
    )
    parser.add_argument(
        "--kv-dtype",
        action="append",
        choices=("float32", "bfloat16", "int8"),
        help="Type of the KV cache, may be repeated; by default the models' own.",
    )
    parser.add_argument(
        "--weights",
        action="append",
        choices=("none", *_WEIGHTS),
        help="Formats of quantized weights, may be repeated; by default all. none: only weights "
        "of the models' types. int8 and int4 as --quantization makes them.",
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault(KERNEL_CACHE, str(kernel_cache()))  # before numba is imported
    return _warm(options.dtype, options.kv_dtype, options.weights or list(_WEIGHTS))


def _warm(
    dtypes: Sequence[str] | None, kv_dtypes: Sequence[str] | None, weights: Sequence[str]
) -> int:
    loads, name = _kernels(dtypes, kv_dtypes, weights)
    print(f"{len(loads)} kernels for {name} in {os.environ[KERNEL_CACHE]}", flush=True)
    began_s = time.monotonic()
    for number, (kernel, load) in enumerate(loads, 1):
        started_s = time.monotonic()
        load()
        seconds = time.monotonic() - started_s
        print(f"[{number}/{len(loads)}] {kernel}, {seconds:.1f} s", flush=True)
    print(f"done in {time.monotonic() - began_s:.0f} s", flush=True)
    return 0


def _kernels(
    dtype_names: Sequence[str] | None,
    kv_dtype_names: Sequence[str] | None,
    weights: Sequence[str],
) -> tuple[list[_Load], str]:
    """All kernels by their names, and the name of the instructions that they use."""
    import torch

    from gpu_worker.sampling import cpu_argmax, cpu_bans, cpu_penalties
    from kernels.cpu.blocks.block_move_kernel import move_kernel
    from kernels.cpu.elementwise.elementwise_arguments import TOKEN_LOOKUP_LAYOUT
    from kernels.cpu.elementwise.lookup_kernel import lookup_kernel
    from kernels.cpu.runtime.graph_executor import graph_kernel
    from kernels.cpu.runtime.instruction_set import detect
    from kernels.cpu.sampling.pruned_argmax_entry_points import is_served, pruned_argmax_kernels

    instructions = detect()
    of_pairs = instructions is not None and instructions.dot.of_pairs
    names = dtype_names or (["float32", "bfloat16"] if of_pairs else ["float32"])
    loads: list[_Load] = [
        ("argmax", cpu_argmax.warm_up),
        ("bans", cpu_bans.warm_up),
        ("penalties", cpu_penalties.warm_up),
        ("block moves", move_kernel),
        ("captured graphs", graph_kernel),
        ("lookups", partial(lookup_kernel, TOKEN_LOOKUP_LAYOUT)),
    ]
    if instructions is not None and is_served(instructions) and "bfloat16" in names:
        loads.append(("pruned argmax", partial(pruned_argmax_kernels, instructions)))
    for name in names:
        kv_dtypes = [getattr(torch, each) for each in kv_dtype_names or [name]]
        loads += _kernels_of(getattr(torch, name), kv_dtypes)
        if instructions is not None:
            loads += _quantized_kernels(getattr(torch, name), weights, instructions)
    return loads, "no vectors" if instructions is None else instructions.name


def _kernels_of(dtype: "torch.dtype", kv_dtypes: "Sequence[torch.dtype]") -> list[_Load]:
    """The kernels of models of one type."""
    import torch

    from kernels.cpu.attention.attention_kernel import attend_kernel
    from kernels.cpu.attention.backend import CpuBackend
    from kernels.cpu.attention.cache_write_kernel import write_kernel
    from kernels.cpu.elementwise import activation_kernel, add_kernel, norm_kernel, rotary_kernel
    from kernels.cpu.linear.linear_kernel import linear_kernel
    from kernels.cpu.linear.unpack_kernel import unpack_kernel
    from kernels.cpu.runtime.instruction_set import best_dot, detect
    from kernels.cpu.sampling.sampler import sample_kernel

    name = str(dtype).removeprefix("torch.")
    loads: list[_Load] = [(f"samples of {name}", partial(sample_kernel, dtype))]
    served = (dtype, *CpuBackend().narrow_dtypes(dtype))
    for kv_dtype in kv_dtypes:
        if kv_dtype in served:
            over = f"{name} over {str(kv_dtype).removeprefix('torch.')}"
            loads.append((f"cache writes, {over}", partial(write_kernel, dtype, kv_dtype)))
            loads.append(
                (f"attention, {over}", partial(attend_kernel, dtype, best_dot(), kv_dtype))
            )
    instructions = detect()
    if instructions is None:
        return loads
    weights = (torch.bfloat16,) if dtype == torch.bfloat16 else (torch.bfloat16, torch.float32)
    for weight in weights:
        of = f"{name} by weights in {str(weight).removeprefix('torch.')}"
        loads.append((f"linear layers, {of}", partial(linear_kernel, weight, dtype, instructions)))
        loads.append((f"lookups, {of}", partial(unpack_kernel, weight, dtype)))
    for kind, make in (
        ("normalization", norm_kernel.norm_kernel),
        ("layer normalization", norm_kernel.layer_norm_kernel),
        ("sums", add_kernel.add_kernel),
        ("activations", activation_kernel.activate_kernel),
        ("rotary embeddings", rotary_kernel.rotary_kernel),
    ):
        loads.append((f"{kind} of {name}", partial(make, dtype)))
    return loads


def _quantized_kernels(
    dtype: "torch.dtype", weights: Sequence[str], instructions: "Instructions"
) -> list[_Load]:
    """Kernels of linear layers with quantized weights."""
    from kernels.cpu.quantized.packed_format import PackedFormat, Products, Rounding
    from kernels.cpu.quantized.quantized_kernel import quantized_kernel
    from kernels.cpu.quantized.quantized_packing import multiplies_bytes

    name, by_bytes = str(dtype).removeprefix("torch."), multiplies_bytes(dtype, instructions)
    loads: list[_Load] = []
    for each, (bits, has_minimums, rounds_rows) in _WEIGHTS.items():
        rounding = Rounding.GROUPS if by_bytes else Rounding.NONE
        form = PackedFormat(
            bits,
            group_size=64,
            products=Products.INT8 if by_bytes else Products.FLOAT32,
            half_scales=True,
            has_minimums=has_minimums,
            rounding=Rounding.ROWS if rounds_rows else rounding,
        )
        if each in weights:
            load = partial(quantized_kernel, form, dtype, instructions)
            loads.append((f"linear layers, {name} by weights in {each}", load))
    return loads


if __name__ == "__main__":
    sys.exit(main())
