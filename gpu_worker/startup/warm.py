"""Compiles CPU kernels into numba's cache: ``python -m gpu_worker.startup.warm``.

A machine image, or a layer of a Docker image, may carry the cache, so that no start compiles. The
cache is in NUMBA_CACHE_DIR, else where ``scripts/serve`` has it. Its keys have the name and the
features of the CPU, so that on another CPU kernels are compiled as if there
were no cache. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, in the environment of this program and of the
worker, name a CPU that several machines have all instructions of. Kernels of quantized weights, of
which there are many formats, are compiled when a model needs them.
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

_Load = tuple[str, Callable[[], object]]


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
    options = parser.parse_args(arguments)
    os.environ.setdefault(KERNEL_CACHE, str(kernel_cache()))  # before numba is imported
    return _warm(options.dtype, options.kv_dtype)


def _warm(dtypes: Sequence[str] | None, kv_dtypes: Sequence[str] | None) -> int:
    loads, name = _kernels(dtypes, kv_dtypes)
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
    dtype_names: Sequence[str] | None, kv_dtype_names: Sequence[str] | None
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


if __name__ == "__main__":
    sys.exit(main())
