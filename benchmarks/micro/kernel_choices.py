"""Times decode steps with and without each optional piece of the CPU kernels.

    python -m benchmarks.micro.kernel_choices [--pieces huge_pages,next_weights] [--batches 1,4,16]

The model is a Llama with random weights, its layers captured as one graph. Two processes take
turns, one as served and one without the piece, so that other work on the machine slows both. A
piece without effect has a ratio of 1.0. Kernels that differ without a piece are compiled to a
folder of their own, which takes up to a minute each.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.micro.cpu_linear import BLOCK_SIZE, CONTEXT_TOKENS, Source, choose_source
from benchmarks.models.random_model import SHAPES
from gpu_worker.model.attention import PagedStep
from gpu_worker.model.fusion.cpu_fusion import fuse
from gpu_worker.model.graph.layer_capture import capture_layers
from gpu_worker.model.ragged_model import RaggedModel
from kernels.cpu.attention.backend import CpuBackend
from kernels.cpu.linear import linear_ir
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.instruction_set import detect
from kernels.cpu.runtime.prefetch import Cache, l1_data_cache_bytes
from kernels.interface import LayerCache, RaggedBatch
from shared.kernel_cache import KERNEL_CACHE, kernel_cache

BATCHES = (1, 4, 16, 64)
_STEPS = 4  # of one turn
_AS_SERVED = "as_served"

_own_prefetch_lines: Callable[..., None] = linear_ir.prefetch_lines


def _no_prefetch(*_: Any) -> None:
    pass


def _prefetch_unless_none(builder: Any, addresses: Any, num_bytes: int, cache: Any) -> None:
    if cache is not None:
        _own_prefetch_lines(builder, addresses, num_bytes, cache)


def _other_cache(num_bytes: int | None) -> Cache:
    return Cache.L2 if num_bytes is not None and num_bytes >= 48 * 1024 else Cache.L1


_LINEAR = "kernels.cpu.linear.linear_ir"
_SKIP_NONE = (_LINEAR, "prefetch_lines", _prefetch_unless_none)

Replacement = tuple[str, str, object]
"""A module, the name of a global of it, and the value that it gets."""

PIECES: Mapping[str, tuple[Replacement, ...]] = {
    # Weights on huge pages.
    "huge_pages": (
        ("kernels.cpu.linear.weight_packing", "on_large_pages", torch.Tensor.contiguous),
    ),
    # Up to four rows: weights a little before they are read, into the first cache alone. It helps
    # the processes beside the worker, which shows only over HTTP.
    "own_weights": (_SKIP_NONE, (_LINEAR, "read_once_cache", lambda: None)),
    # More rows: the next panels, while the first blocks of rows are multiplied.
    "next_weights": (_SKIP_NONE, (_LINEAR, "Cache", SimpleNamespace(L2=None))),
    # The next tile's keys and values.
    "keys_and_values": (
        ("kernels.cpu.attention.tile_ir", "prefetch", _no_prefetch),
        ("kernels.cpu.attention.decode_bf16_dot_ir", "prefetch", _no_prefetch),
    ),
    # The cache for data that is read once; without: the other one.
    "choice_of_cache": (("kernels.cpu.runtime.prefetch", "choose_read_once_cache", _other_cache),),
    # KV heads of a sequence in one task.
    "shared_head_tasks": (("kernels.cpu.attention.backend", "_TASKS_PER_THREAD", 1 << 40),),
    # Sums go back to memory after 512 inputs.
    "depth_blocks": (("kernels.cpu.linear.linear_arguments", "DEPTH", 1 << 40),),
    # Threads yield their cores between ops.
    "yields": (("kernels.cpu.runtime.captured_graph", "_YIELD_EVERY", 1 << 60),),
}
"""What is replaced to leave a piece out, by the piece's name."""

SAME_KERNELS = {"huge_pages", "shared_head_tasks", "yields"}
"""Pieces without which kernels are compiled to the same code."""


def leave_out(piece: str) -> None:
    """Compute without a piece in this process; before any kernel is compiled."""
    for module, name, value in PIECES[piece]:
        setattr(importlib.import_module(module), name, value)


@dataclass(slots=True)
class Side:
    """A process that computes steps on request."""

    process: "subprocess.Popen[str]"

    @staticmethod
    def start(piece: str, arguments: Sequence[str], cache: str) -> "Side":
        """Without a piece, or as served; the folder holds its compiled kernels."""
        command = [sys.executable, "-m", "benchmarks.micro.kernel_choices", *arguments]
        environment = {**os.environ, KERNEL_CACHE: cache}
        process = subprocess.Popen(
            [*command, "--serve", piece],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return Side(process)

    def times_ms(self, batch: int) -> list[float]:
        """Of some steps of so many sequences."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{batch}\n")
        self.process.stdin.flush()
        found: list[float] = json.loads(self.process.stdout.readline())
        return found

    def stop(self) -> None:
        """End the process."""
        self.process.communicate()


@torch.inference_mode()
def serve(source: Source, batches: Sequence[int]) -> None:
    """Compute steps for each line of standard input, a number of sequences."""
    steps = decode_steps(source, batches)
    for line in sys.stdin:
        run = steps[int(line)]
        times = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
        print(json.dumps(times), flush=True)


def decode_steps(source: Source, batches: Sequence[int]) -> dict[int, Callable[[], object]]:
    """Steps that give every sequence a token more, over a pool with random contents."""
    instructions = detect()
    assert instructions is not None, "this CPU is not served"
    config, most = source.config, max(batches)
    model = source.build(torch.bfloat16)
    attention = [shape.module for shape in model.observe_layers()]
    kernels, backend = CpuLayers(instructions), CpuBackend()
    fuse(model.model, kernels, model.dtype, attention)
    num_blocks = most * (CONTEXT_TOKENS // BLOCK_SIZE)
    shape = (2, num_blocks, config.num_key_value_heads, BLOCK_SIZE, config.head_dim)
    caches = {}
    for module in attention:
        key, value = torch.randn(shape).to(model.dtype)
        caches[module] = LayerCache(key, value)
    capture_layers(model, attention, kernels, backend, caches, most, CONTEXT_TOKENS)
    tables = torch.randperm(num_blocks).to(torch.int32).view(most, -1)
    return {
        batch: _decode_step(model, backend, caches, tables[:batch].contiguous())
        for batch in batches
    }


def _decode_step(
    model: RaggedModel, backend: CpuBackend, caches: Any, tables: torch.Tensor
) -> Callable[[], object]:
    num_seqs, last = len(tables), CONTEXT_TOKENS - 1
    batch = RaggedBatch(
        slot_mapping=tables[:, -1].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables=tables,
        context_lens=torch.full((num_seqs,), CONTEXT_TOKENS, dtype=torch.int32),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32),
        max_query_len=1,
        max_context_len=CONTEXT_TOKENS,
    )
    step = PagedStep(backend, caches, batch)
    token_ids = torch.arange(num_seqs)
    positions = torch.full((num_seqs,), last)
    return lambda: model.forward(token_ids, positions, step, rows=None)


def compare(
    served: Side, piece: str, arguments: Sequence[str], batches: Sequence[int], turns: int
) -> dict[int, dict[str, float]]:
    """Median milliseconds of a step with and without a piece, by batch size."""
    with tempfile.TemporaryDirectory() as folder:
        cache = str(kernel_cache()) if piece in SAME_KERNELS else folder
        sides = {"with": served, "without": Side.start(piece, arguments, cache)}
        found = {}
        for batch in batches:
            times: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(turns + 1):
                for name, side in sides.items():
                    measured = side.times_ms(batch)
                    times[name] += measured if turn else []  # the first turn warms up
            found[batch] = {name: statistics.median(each) for name, each in times.items()}
        sides["without"].stop()
    return found


def main() -> None:
    """Measure and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="162m", help="of random weights")
    parser.add_argument("--threads", type=int, help="by default torch's own number")
    parser.add_argument("--pieces", type=lambda text: text.split(","), default=list(PIECES))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="sequences")
    parser.add_argument("--turns", type=int, default=10, help=f"of {_STEPS} steps each")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", choices=[_AS_SERVED, *PIECES], help=argparse.SUPPRESS)
    args = parser.parse_args()
    batches = tuple(map(int, args.batches.split(",")))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.serve is not None:
        if args.serve != _AS_SERVED:
            leave_out(args.serve)
        serve(choose_source(args.shape, None), batches)
        return
    unknown = set(args.pieces) - PIECES.keys()
    if unknown:
        parser.error(f"--pieces: {sorted(unknown)}; there are {list(PIECES)}")
    arguments = ["--shape", args.shape, "--batches", args.batches]
    arguments += [] if args.threads is None else ["--threads", str(args.threads)]
    served = Side.start(_AS_SERVED, arguments, str(kernel_cache()))
    found = {}
    for piece in args.pieces:
        print(f"{piece} ...", file=sys.stderr)
        found[piece] = compare(served, piece, arguments, batches, args.turns)
    served.stop()
    if args.json:
        print(json.dumps({"l1_data_bytes": l1_data_cache_bytes(), "steps_ms": found}))
        return
    print(f"{'without':<20}" + "".join(f"{f'batch {batch}':>26}" for batch in batches))
    for piece, by_batch in found.items():
        print(f"{piece:<20}" + "".join(f"{_cell(each):>26}" for each in by_batch.values()))


def _cell(times: Mapping[str, float]) -> str:
    with_it, without = times["with"], times["without"]
    return f"{with_it:.2f} -> {without:.2f} ({without / with_it:.2f})"


if __name__ == "__main__":
    main()
