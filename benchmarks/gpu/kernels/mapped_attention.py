"""Measures attention over memory that is contiguous by mapping only (vAttention)."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.gpu.kernels.cases import AttentionCase
from benchmarks.gpu.kernels.clock import Clock
from benchmarks.gpu.kernels.report import Baseline, Row
from gpu_worker.kv import cpu_mapping, cuda_mapping
from gpu_worker.kv.mapping import Mapper
from gpu_worker.kv.token_layout import TokenLayout, fit_tokens
from gpu_worker.model.ragged_model import LayerShape
from kernels.interface import AttentionBackend, AttentionParams, LayerCache, RaggedBatch
from kernels.reference import ReferenceBackend

_NUM_LAYERS = 4
# Kernels treat blocks of more than 1,024 tokens as whole sequences.
_LEAST_RANGE_TOKENS = 1152
_TARGET = 0.98
_LARGEST_ERROR = 0.02


def measure_mapped(
    clock: Clock,
    backend: AttentionBackend,
    case: AttentionCase,
    device: torch.device,
    ceiling: float,
) -> Iterator[Row]:
    """Decode over mapped blocks, compared with a plain tensor and with block tables.

    All three read the layout of virtual memory; blocks are in random order.

    Raises:
        RuntimeError: an output is wrong.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    params = AttentionParams(case.head_dim**-0.5)
    shapes = [
        LayerShape(nn.Identity(), case.num_kv_heads, case.head_dim, dtype, params)
        for _ in range(_NUM_LAYERS)
    ]
    layout = fit_tokens(shapes, case.block_size, _page_bytes(device))
    longest = max(context for _, context in case.sequences)
    range_blocks = -(-max(longest, _LEAST_RANGE_TOKENS) // case.block_size)
    num_seqs = len(case.sequences)
    num_blocks = num_seqs * range_blocks
    mapper = _make_mapper(device, num_blocks, layout)
    try:
        yield _time_mapping(clock, mapper, layout)
        tables = torch.randperm(num_blocks).to(torch.int32).view(num_seqs, range_blocks)
        for place, block in enumerate(tables.flatten().tolist()):
            mapper.map(place, block, 1)
        yield _time_attention(clock, backend, case, ceiling, mapper, layout, tables.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize()
    finally:
        mapper.close()


def _time_mapping(clock: Clock, mapper: Mapper, layout: TokenLayout) -> Row:
    """Map one block at one place after another, each time replacing another one."""

    def replace() -> None:
        for block in range(8):
            mapper.map(0, block, 1)

    calls: list[Callable[[], None]] = [replace] * 9
    replace()
    timing = clock.wall_clock(calls)
    work = 8 * layout.block_bytes
    return Row(f"map 8 blocks of {layout.block_bytes} bytes", timing, work, "bytes")


def _time_attention(
    clock: Clock,
    backend: AttentionBackend,
    case: AttentionCase,
    ceiling: float,
    mapper: Mapper,
    layout: TokenLayout,
    tables: torch.Tensor,  # [S, C] int32
) -> Row:
    device, shape = tables.device, layout.shapes[1]
    range_tokens = tables.shape[1] * layout.block_size
    for start in range(0, mapper.pool.numel(), 2**28):
        part = mapper.pool[start : start + 2**28].view(shape.dtype)
        part.copy_(torch.randn(part.shape, device=device))
    plain = torch.empty(mapper.space.numel(), dtype=torch.uint8, device=device)
    plain.copy_(mapper.space)
    own = torch.arange(len(tables), dtype=torch.int32, device=device).view(-1, 1)
    over: dict[str, tuple[LayerCache, torch.Tensor]] = {
        "mapped": (layout.views(mapper.space, range_tokens)[shape.module], own),
        "the same over a plain tensor": (layout.views(plain, range_tokens)[shape.module], own),
        "paged, the same layout": (
            layout.views(mapper.pool, layout.block_size)[shape.module],
            tables,
        ),
    }
    size = (len(tables), case.num_heads, case.head_dim)
    query = torch.randn(size, device=device).to(shape.dtype)
    exact, out = torch.empty_like(query), torch.empty_like(query)
    cache, table = over["paged, the same layout"]
    ReferenceBackend().attend(query, cache, _batch(case, table), shape.params, exact)
    timed = {}
    for name, (cache, table) in over.items():
        call = partial(backend.attend, query, cache, _batch(case, table), shape.params, out)
        out.fill_(float("nan"))
        timing = clock.time([call])
        error = float((out.float() - exact.float()).abs().max() / exact.float().abs().max())
        if not error <= _LARGEST_ERROR:
            raise RuntimeError(f"{case.name}, {name}: the output is wrong by {error:.1e}")
        timed[name] = (timing, error)
    ours, error = timed.pop("mapped")
    wanted = {"the same over a plain tensor": _TARGET}
    baselines = tuple(
        Baseline(name, timing, wrong, None, wanted.get(name))
        for name, (timing, wrong) in timed.items()
    )
    name = f"{case.name}, mapped blocks of {layout.block_size}"
    work = case.bytes_moved(shape.dtype.itemsize)
    return Row(name, ours, work, "bytes", ceiling, None, error, baselines)


def _batch(case: AttentionCase, tables: torch.Tensor) -> RaggedBatch:
    """A batch with one row of each sequence."""
    device, num_seqs = tables.device, len(case.sequences)
    contexts = [context for _, context in case.sequences]
    return RaggedBatch(
        slot_mapping=torch.zeros(num_seqs, dtype=torch.int64, device=device),
        block_tables=tables,
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_context_len=max(contexts),
    )


def _page_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return cpu_mapping.PAGE_BYTES
    return cuda_mapping.page_bytes(cuda_mapping.load_driver(), device.index or 0)


def _make_mapper(device: torch.device, num_blocks: int, layout: TokenLayout) -> Mapper:
    """A mapper with as many places as blocks."""
    size = layout.block_bytes
    if device.type == "cpu":
        return cpu_mapping.CpuMapper(num_blocks, num_blocks, size, cpu_mapping.spare_mappings())
    events: tuple[cuda_mapping.Event, cuda_mapping.Event] = (
        torch.cuda.Event(),  # type: ignore[no-untyped-call]
        torch.cuda.Event(),  # type: ignore[no-untyped-call]
    )
    driver = cuda_mapping.load_driver()
    return cuda_mapping.CudaMapper(driver, events, device, num_blocks, num_blocks, size)
