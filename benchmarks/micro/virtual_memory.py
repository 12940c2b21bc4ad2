"""Times paged against virtual KV memory on this CPU: attention over both, and the cost of mapping.

Run with ``python -m benchmarks.micro.virtual_memory``. Times are medians, on one thread; only
ratios of one run are meaningful on a machine that does other work too.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from gpu_worker.kv.allocation import PagedAllocator, VirtualAllocator
from gpu_worker.kv.cpu_mapping import PAGE_BYTES, spare_mappings
from gpu_worker.kv.memory import KVMemory
from gpu_worker.model.attention import PagedStep
from gpu_worker.model.ragged_model import LayerShape
from gpu_worker.step.token_placement import Placement
from kernels.cpu.attention.backend import CpuBackend
from kernels.interface import AttentionBackend, AttentionParams
from kernels.sdpa import SdpaBackend

BLOCK_SIZE = 16
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of equal length: ``query_len`` rows over ``context_len`` tokens each."""

    num_seqs: int
    query_len: int
    context_len: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


CASES = (
    Case(64, 1, 200, 6, 4, 2, 64),  # the demo model
    Case(64, 1, 200, 12, 12, 12, 64),
    Case(8, 1, 4096, 8, 32, 8, 128),
    Case(1, 512, 512, 12, 12, 12, 64),
    Case(1, 512, 2048, 8, 32, 8, 128),
)


def main() -> None:
    """Print one line per case."""
    torch.set_num_threads(1)
    for case in CASES:
        print(case)
        for line in _measure(case):
            print("   ", line)


def _measure(case: Case) -> Sequence[str]:
    params = AttentionParams(scale=case.head_dim**-0.5)
    shapes = [
        LayerShape(nn.Identity(), case.num_kv_heads, case.head_dim, torch.bfloat16, params)
        for _ in range(case.num_layers)
    ]
    blocks_each = -(-case.context_len // BLOCK_SIZE) + 1  # one to grow into
    num_blocks = case.num_seqs * blocks_each
    spare = spare_mappings()
    virtual_allocator = VirtualAllocator(BLOCK_SIZE, CPU, 8192, PAGE_BYTES, spare)
    paged = PagedAllocator(BLOCK_SIZE, CPU).allocate(shapes, num_blocks)
    virtual = virtual_allocator.allocate(shapes, num_blocks)
    for layer, cache in paged.layers.items():
        cache.key.normal_()
        cache.value.normal_()
        virtual.layers[layer].key.copy_(cache.key)
        virtual.layers[layer].value.copy_(cache.value)
    placement = _placement(case, np.random.default_rng(0).permutation(num_blocks))
    mapping_us = _mapping_us(virtual, placement)
    paged_ms, expected = _attention(case, shapes, paged, CpuBackend(), placement)
    virtual_ms, found = _attention(case, shapes, virtual, CpuBackend(), placement)
    sdpa_ms, theirs = _attention(case, shapes[-1:], virtual, SdpaBackend(), placement)
    assert torch.equal(found, expected)
    error = (theirs.float() - expected.float()).abs().max().item()
    return (
        f"write and attend, per layer: paged {paged_ms:.2f} ms, virtual {virtual_ms:.2f} ms "
        f"({virtual_ms / paged_ms:.2f} x), virtual by torch's SDPA {sdpa_ms:.2f} ms "
        f"({sdpa_ms / paged_ms:.2f} x, largest difference {error:.1e})",
        mapping_us,
    )


def _placement(case: Case, blocks: np.ndarray) -> Placement:
    tables = blocks.reshape(case.num_seqs, -1).astype(np.int32)
    span = np.arange(case.context_len - case.query_len, case.context_len)
    positions = np.tile(span, case.num_seqs)
    owners = np.repeat(np.arange(case.num_seqs), case.query_len)
    of_tokens = tables[owners, positions // BLOCK_SIZE].astype(np.int64)
    return Placement(
        slots=np.arange(case.num_seqs),
        sizes=None if case.query_len == 1 else np.full(case.num_seqs, case.query_len),
        positions=positions,
        context_lens=np.full(case.num_seqs, case.context_len),
        num_blocks=np.full(case.num_seqs, -(-case.context_len // BLOCK_SIZE)),
        block_tables=tables,
        slot_mapping=of_tokens * BLOCK_SIZE + positions % BLOCK_SIZE,
    )


def _attention(
    case: Case,
    shapes: Sequence[LayerShape],
    memory: KVMemory,
    backend: AttentionBackend,
    placement: Placement,
) -> tuple[float, torch.Tensor]:
    """Milliseconds of a step's writes and attention per layer, and the last output."""
    torch.manual_seed(0)
    num_tokens = case.num_seqs * case.query_len
    query = torch.randn(num_tokens, case.num_heads, case.head_dim).bfloat16()
    new = torch.randn(num_tokens, case.num_kv_heads, case.head_dim).bfloat16()
    step = PagedStep(backend, memory.caches, memory.translate(placement).ragged(CPU))
    outputs: list[torch.Tensor] = []

    def run() -> None:
        outputs.clear()
        for shape in shapes:
            outputs.append(step.attend(shape.module, query, new, new, shape.params))

    return 1e3 * _median_s(run, 7) / len(shapes), outputs[-1]


def _mapping_us(memory: KVMemory, placement: Placement) -> str:
    """Mapping time of a step if everything, nothing, or one block in sixteen sequences is new."""
    none_taken = np.zeros(len(placement.slots), np.bool_)
    rolled = np.roll(placement.block_tables, 1, axis=1)
    turns = [placement, replace(placement, block_tables=rolled)]

    def everything() -> None:
        turns.reverse()
        memory.keep(none_taken)
        memory.translate(turns[0])

    all_us = 1e6 * _median_s(everything)
    memory.translate(placement)
    same_us = 1e6 * _median_s(lambda: memory.translate(placement))
    grown = placement.num_blocks.copy()
    grown[::16] += 1

    def growth() -> float:
        memory.translate(placement)
        tables = placement.block_tables.copy()
        tables[:, -1] = np.random.default_rng().permutation(tables[:, -1])
        began = time.perf_counter()
        memory.translate(replace(placement, num_blocks=grown, block_tables=tables))
        return time.perf_counter() - began

    growth_us = 1e6 * statistics.median(growth() for _ in range(15))
    num_blocks = int(placement.num_blocks.sum())
    return (
        f"mapping, µs per step: nothing new {same_us:.0f}, {len(grown[::16])} sequences grow "
        f"{growth_us:.0f}, all {num_blocks} blocks new {all_us:.0f} "
        f"({all_us / num_blocks:.1f} per block)"
    )


def _median_s(run: Callable[[], object], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
