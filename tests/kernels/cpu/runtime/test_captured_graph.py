"""Rotary embeddings and sums against torch, and kernels that are captured once and replayed."""

import dataclasses
from functools import partial

import pytest
import torch

from kernels.cpu.elementwise.elementwise_arguments import (
    POSITION_LOOKUP_LAYOUT,
    TOKEN_LOOKUP_LAYOUT,
)
from kernels.cpu.elementwise.table_lookup import CpuLookups
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.linear.weight_packing import pack
from kernels.cpu.runtime.captured_graph import CapturedGraph, GraphCapture
from kernels.cpu.runtime.instruction_set import detect
from kernels.cpu.runtime.thread_team import capturing
from kernels.interface import RaggedBatch

DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, H, D] turned, as far as there are cosines, as transformers does it."""
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = x.chunk(2, -1)
    turned = x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
    return torch.cat((turned, rest), -1)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(6, 6), (64, 64), (80, 80), (6, 2), (64, 16), (80, 32), (96, 70)]
)
@pytest.mark.parametrize("num_tokens", [1, 9, 300])
def test_rotary_embeddings_are_torchs_bit_for_bit(
    kernels: CpuLayers, threads: None, num_tokens: int, head_dim: int, rotary_dim: int
) -> None:
    rows = random(num_tokens, 5, 2 * head_dim)[:, :, :head_dim]  # heads lie apart
    query, key = rows[:, :3], rows[:, 3:]
    cos, sin = random(2, num_tokens, rotary_dim, seed=1)
    found = kernels.rotary(torch.float32)(query, key, cos, sin)
    for ours, x in zip(found, (query, key), strict=True):
        assert torch.equal(ours, rotated(x, cos, sin))


def test_rotary_embeddings_in_bfloat16_are_rounded_once(kernels: CpuLayers) -> None:
    query, key = random(2, 7, 4, 32, dtype=torch.bfloat16)
    cos, sin = random(2, 7, 32, seed=1, dtype=torch.bfloat16)
    found = kernels.rotary(torch.bfloat16)(query, key, cos, sin)
    for ours, x in zip(found, (query, key), strict=True):
        assert torch.equal(ours, rotated(x.float(), cos.float(), sin.float()).bfloat16())


def test_rotary_embeddings_refuse_what_does_not_fit(kernels: CpuLayers) -> None:
    rotary = kernels.rotary(torch.float32)
    x, angles = random(3, 2, 16), random(3, 16)
    with pytest.raises(ValueError, match="key"):
        rotary(x, x[:2], angles, angles)
    for cos, sin in ((angles[:, :8], angles), (angles[:2], angles[:2]), (angles[:, :7],) * 2):
        with pytest.raises(ValueError, match="cos"):
            rotary(x, x, cos, sin)
    with pytest.raises(ValueError, match="cos"):
        rotary(x, x, *random(2, 3, 18))
    with pytest.raises(ValueError, match="bfloat16"):
        rotary(x, x.bfloat16(), angles, angles)
    with pytest.raises(ValueError, match="contiguous"):
        rotary(x, random(3, 2, 32)[:, :, ::2], angles, angles)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 37), (40, 5000)])
def test_sums_are_torchs(
    kernels: CpuLayers, threads: None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    left, right = random(2, *shape, dtype=dtype)
    assert torch.equal(kernels.elements.add(left, right), left + right)


def test_sums_of_other_shapes_are_refused(kernels: CpuLayers) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kernels.elements.add(random(4, 4).T, random(4, 4))
    with pytest.raises(ValueError, match=r"\(4, 1\)"):
        kernels.elements.add(random(4, 1), random(4, 4))


def batch(num_tokens: int) -> RaggedBatch:
    """One row for each of so many sequences."""
    return RaggedBatch(
        slot_mapping=torch.full((num_tokens,), -1),
        block_tables=torch.zeros(num_tokens, 1, dtype=torch.int32),
        context_lens=torch.ones(num_tokens, dtype=torch.int32),
        query_starts=torch.arange(num_tokens + 1, dtype=torch.int32),
        max_query_len=1,
        max_context_len=1,
    )


class Chain:
    """Layers that read what those before have written, so that every wait is needed."""

    def __init__(self, kernels: CpuLayers, num_features: int, num_tokens: int) -> None:
        self.kernels = kernels
        weights = [random(num_features, num_features, seed=n) for n in range(6)]
        self.layers = [kernels.linear(pack([weight]), torch.float32) for weight in weights]
        self.norm = kernels.rms_norm(torch.ones(num_features), 1e-6, torch.float32)
        self.x = random(num_tokens, num_features, seed=9)
        capture = GraphCapture()
        with capturing(capture):
            self.kept, self.out = self.compute(self.x)
        self.ops = capture.ops
        self.graph = CapturedGraph(self.ops, num_tokens)

    def compute(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """All that was computed on the way, and the last of it."""
        kept = []
        for layer in self.layers:
            normed = self.norm(x)
            (y,) = layer(normed)
            x = self.kernels.elements.add(x, y)
            kept += [normed, y, x]
        return kept, x


def test_captured_kernels_do_not_run(kernels: CpuLayers) -> None:
    capture = GraphCapture()
    with capturing(capture):
        out = kernels.elements.add(random(64), random(64))
        out.fill_(7)
    assert len(capture.ops) == 1
    assert (out == 7).all()
    assert not (kernels.elements.add(random(64), random(64)) == 7).any()  # and now all runs again


@pytest.mark.parametrize("num_features", [64, 1024])  # one thread is enough, or it is not
def test_a_replay_computes_what_its_kernels_compute_for_any_number_of_rows(
    kernels: CpuLayers, threads: None, num_features: int
) -> None:
    chain = Chain(kernels, num_features, num_tokens=200)
    for num_tokens in (200, 1, 2, 97, 1, 200):
        chain.x.copy_(random(200, num_features, seed=num_tokens))
        chain.out.fill_(torch.nan)
        chain.graph.replay(num_tokens, batch(num_tokens))
        _, expected = chain.compute(chain.x[:num_tokens])
        assert torch.equal(chain.out[:num_tokens], expected)
        assert chain.out[num_tokens:].isnan().all()


def test_a_replay_can_end_after_so_many_ops(kernels: CpuLayers, threads: None) -> None:
    chain = Chain(kernels, 64, num_tokens=3)
    kept, _ = chain.compute(chain.x)
    for num_ops in (len(chain.ops), 4, len(chain.ops), 1):
        for each in chain.kept:
            each.fill_(torch.nan)
        chain.graph.replay(3, batch(3), num_ops)
        for number, (found, expected) in enumerate(zip(chain.kept, kept, strict=True)):
            assert torch.equal(found, expected) == (number < num_ops)


@pytest.mark.parametrize("num_threads", [2, 7])
def test_threads_never_overtake_each_other(kernels: CpuLayers, num_threads: int) -> None:
    """Not even where they share cores, so that some join when an op has long ended."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        chain = Chain(kernels, 1024, num_tokens=2)
        _, expected = chain.compute(chain.x)
        for _ in range(300):
            chain.out.fill_(torch.nan)
            chain.graph.replay(2, batch(2))
            assert torch.equal(chain.out, expected)
    finally:
        torch.set_num_threads(before)


def test_a_graph_serves_with_fewer_threads_than_it_was_made_for(kernels: CpuLayers) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        chain = Chain(kernels, 1024, num_tokens=3)
        for num_threads in (2, 1, 4, 6):
            torch.set_num_threads(num_threads)
            _, expected = chain.compute(chain.x)
            chain.graph.replay(3, batch(3))
            assert torch.equal(chain.out, expected)
    finally:
        torch.set_num_threads(before)


def test_a_graph_refuses_steps_that_it_is_not_made_for(kernels: CpuLayers) -> None:
    graph = Chain(kernels, 64, num_tokens=3).graph
    with pytest.raises(ValueError, match="4 tokens"):
        graph.replay(4, batch(4))
    with pytest.raises(ValueError, match="3 slots for 2 tokens"):
        graph.replay(2, batch(3))
    wrong = dataclasses.replace(batch(2), block_tables=batch(2).block_tables.long())
    with pytest.raises(ValueError, match="block_tables"):
        graph.replay(2, wrong)


def test_rows_must_be_those_of_tokens(kernels: CpuLayers) -> None:
    ops = Chain(kernels, 64, num_tokens=3).ops
    with pytest.raises(ValueError, match="3 rows for 2 tokens"):
        CapturedGraph(ops, 2)


def looked_up(
    table: torch.Tensor, angles: torch.Tensor, num_tokens: int
) -> tuple[CapturedGraph, torch.Tensor, torch.Tensor]:
    """A graph that looks up rows of both, and the outputs of its lookups."""
    lookups, nowhere = CpuLookups(), torch.zeros(num_tokens, dtype=torch.int64)
    rows = torch.empty(num_tokens, *table.shape[1:], dtype=table.dtype)
    turns = torch.empty(num_tokens, *angles.shape[1:], dtype=angles.dtype)
    capture = GraphCapture()
    with capturing(capture):
        lookups.look_up(TOKEN_LOOKUP_LAYOUT, table, nowhere, rows)
        lookups.look_up(POSITION_LOOKUP_LAYOUT, angles, nowhere, turns)
    return CapturedGraph(capture.ops, num_tokens), rows, turns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 37, 768])
def test_lookups_are_torchs(size: int, dtype: torch.dtype) -> None:
    table, angles = random(50, size, dtype=dtype), random(20, 3, seed=1)
    graph, rows, turns = looked_up(table, angles, 30)
    for num_tokens in (30, 1, 9, 30):
        generator = torch.Generator().manual_seed(num_tokens)
        token_ids = torch.randint(50, (num_tokens,), generator=generator)
        positions = torch.randint(20, (num_tokens,), generator=generator)
        rows.fill_(7)
        graph.replay(num_tokens, batch(num_tokens), lookup_indices=(token_ids, positions))
        assert torch.equal(rows[:num_tokens], table[token_ids])
        assert torch.equal(turns[:num_tokens], angles[positions])
        assert (rows[num_tokens:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_a_table_does_not_have_are_no_numbers(dtype: torch.dtype) -> None:
    table, far = random(50, 8, dtype=dtype), 1 << 62
    rows = torch.zeros(6, 8, dtype=dtype)
    indices = torch.tensor([-1, 0, 49, 50, far, -far])
    CpuLookups().look_up(TOKEN_LOOKUP_LAYOUT, table, indices, rows)
    assert torch.equal(rows[1:3], table[[0, 49]])
    assert rows[[0, 3, 4, 5]].isnan().all()


def test_lookups_refuse_what_does_not_fit() -> None:
    table, indices = random(50, 8), torch.zeros(3, dtype=torch.int64)
    look_up = partial(CpuLookups().look_up, TOKEN_LOOKUP_LAYOUT)
    for out in (torch.zeros(3, 9), torch.zeros(2, 8), torch.zeros(3, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="cannot hold 3 rows"):
            look_up(table, indices, out)
    with pytest.raises(ValueError, match="int32"):
        look_up(table, indices.int(), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="contiguous"):
        look_up(table[:, ::2], indices, torch.zeros(3, 4))


def test_a_graph_with_lookups_needs_token_ids_and_positions(kernels: CpuLayers) -> None:
    graph, _, _ = looked_up(random(5, 8), random(5, 8), 3)
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="token ids and positions"):
        graph.replay(3, batch(3))
    with pytest.raises(ValueError, match="2 token_ids for 3 tokens"):
        graph.replay(3, batch(3), lookup_indices=(ids[:2], ids))
    with pytest.raises(ValueError, match="positions"):
        graph.replay(3, batch(3), lookup_indices=(ids, ids.int()))
    with pytest.raises(ValueError, match="token ids and positions"):
        Chain(kernels, 64, 3).graph.replay(3, batch(3), lookup_indices=(ids, ids))
