"""Models that are split over ranks: tokens of transformers' generate, and no rank has all of it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from gpu_worker.model import loader
from gpu_worker.model.split.split_loading import SplitModel
from gpu_worker.model.split.weight_part import Part
from gpu_worker.ranks.member import Member
from gpu_worker.startup.build import Worker
from kernels.cpu.elementwise.rank_sum_kernel import CHUNK_ELEMENTS
from shared.errors import ModelUnsupported
from shared.messages.plans import Admission
from tests.gpu_worker.beam_search import BeamSearch, beam_sampling, search
from tests.gpu_worker.conftest import MakeWorker, ModelPath, poison, prompt
from tests.gpu_worker.everything import everything
from tests.gpu_worker.planner import GREEDY, Planner, ints, step_plan
from tests.gpu_worker.ranks.rank_threads import RankThreads
from tests.gpu_worker.test_tokens_equal_generate import generate
from tests.support.compressed_checkpoints import W4A16_ASYMMETRIC, W8A8, compress
from tests.support.models import tiny_model
from tests.support.weights import reference_model

FAMILIES = ("llama", "opt", "gpt2", "qwen3", "mistral", "gemma2", "gpt_neox", "phi3")


@pytest.fixture(scope="module")
def pair() -> Iterator[RankThreads]:
    threads = RankThreads(2)
    yield threads
    threads.close()


def embedding_bytes(worker: Worker) -> int:
    """Memory of the embeddings and of an output layer of its own, which every rank has."""
    model = worker.executor._model.model  # type: ignore[attr-defined]
    vocabulary = model.config.vocab_size * 4 * model.config.hidden_size
    positions = getattr(model.config, "max_position_embeddings", 0) * 4 * model.config.hidden_size
    return vocabulary * (1 if model.config.tie_word_embeddings else 2) + positions


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_are_those_of_generate(kind: str, pair: RankThreads, model_path: ModelPath) -> None:
    path = model_path(kind)
    model = reference_model(path)
    block_size = 8 if FAMILIES.index(kind) % 2 else 16
    workers, ranks = pair.build(str(path), block_size=block_size)
    first, second = prompt(50, 1), prompt(17, 2)

    def served(rank: int) -> list[list[int]]:
        planner = Planner(workers[rank].executor)
        planner.admit(1, first)
        planner.step(s1=33)
        planner.admit(2, second)
        planner.step(s1=17, s2=9)
        planner.step(s2=8)
        return [planner.run(handle, 16)[:16] for handle in (1, 2)]

    expected = [generate(model, tokens, 16) for tokens in (first, second)]
    assert pair.run(served) == [expected, expected]
    assert not any(rank.failure() for rank in ranks)
    whole = sum(each.nbytes for each in load_file(path / "model.safetensors").values())
    for worker in workers:
        assert worker.weight_bytes <= whole / 2 + embedding_bytes(worker)


def test_preemption_forks_prefixes_and_samples_are_those_of_one_worker(
    pair: RankThreads, model_path: ModelPath, make_worker: MakeWorker
) -> None:
    settings: dict[str, Any] = {"block_size": 16, "num_blocks": 96, "num_host_blocks": 8}
    expected = everything(Planner(make_worker("llama", **settings).executor))
    for memory in ("paged", "virtual"):
        block_size = 16 if memory == "paged" else 64  # whole pages
        workers, _ = pair.build(
            str(model_path("llama")), **{**settings, "block_size": block_size}, kv_memory=memory
        )
        if memory == "virtual":
            settings["block_size"] = block_size
            expected = everything(Planner(make_worker("llama", **settings).executor))
        planners = [Planner(worker.executor) for worker in workers]
        assert pair.run(partial(_everything, planners)) == [expected, expected]


def _everything(planners: list[Planner], rank: int) -> list[list[int]]:
    return everything(planners[rank])


def swapped_and_searched(worker: Worker) -> list[Any]:
    """Tokens of a sequence that is swapped out and in, and of a beam search."""
    executor = worker.executor
    planner = Planner(executor)
    planner.admit(1, prompt(20))
    planner.step(s1=20)
    output = list(planner.run(1, 5))
    gone = planner.known[1].blocks
    hosts = ints(*range(len(gone)))
    executor.execute(
        step_plan(6, retired=ints(1), swap_out_device=ints(*gone), swap_out_host=hosts)
    )
    poison(executor)
    blocks = ints(*range(40, 40 + len(gone) + 1))
    back = Admission(2, 0, np.array(prompt(20) + output, np.int32), 20, 24, blocks, GREEDY)
    swapped_in = {"swap_in_host": hosts, "swap_in_device": blocks[: len(gone)]}
    chunk = {"chunk_handles": ints(2), "chunk_tokens": ints(1)}
    results = [executor.execute(step_plan(7, admissions=(back,), **swapped_in, **chunk))]
    results += [executor.execute(step_plan(step)) for step in (8, 9)]
    executor.reset()
    found = BeamSearch(Planner(executor), 1, prompt(10), beam_sampling(3, max_tokens=8))
    search(found.planner, found)
    tokens = [output, *(result.tokens.tolist() for result in results)]
    return [*tokens, *(each.output for each in found.finished)]


def test_swapping_and_beams_are_those_of_one_worker(
    pair: RankThreads, model_path: ModelPath, make_worker: MakeWorker
) -> None:
    settings: dict[str, Any] = {"block_size": 8, "num_host_blocks": 8}
    expected = swapped_and_searched(make_worker("llama", **settings))
    workers, _ = pair.build(str(model_path("llama")), **settings)
    assert pair.run(lambda rank: swapped_and_searched(workers[rank])) == [expected, expected]


@pytest.mark.parametrize(
    ("num_ranks", "changes", "kv_heads"),
    [
        (4, {}, [1, 1, 1, 1]),
        (2, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, [1, 2]),
    ],
    ids=["two KV heads on four ranks", "three KV heads on two ranks"],
)
def test_tokens_are_those_of_generate_where_ranks_do_not_divide_the_kv_heads(
    num_ranks: int, changes: dict[str, Any], kv_heads: list[int], tmp_path: Path
) -> None:
    path = tiny_model("llama", tmp_path, **changes)
    ranks = RankThreads(num_ranks)
    workers, _ = ranks.build(str(path))
    expected = generate(reference_model(path), prompt(40), 12)
    assert ranks.run(lambda rank: greedy(workers[rank])) == [expected] * num_ranks
    pools = [worker.executor.memory.geometry.bytes_per_block for worker in workers]
    assert [pool // (pools[0] // kv_heads[0]) for pool in pools] == kv_heads
    ranks.close()


def greedy(worker: Worker) -> list[int]:
    """Twelve tokens after a prompt."""
    planner = Planner(worker.executor)
    planner.admit(1, prompt(40))
    planner.step(s1=40)
    return planner.run(1, 12)


def test_a_quantized_checkpoint_generates_as_its_dequantized_weights_do(
    pair: RankThreads, tmp_path: Path
) -> None:
    """A rank has 48 inputs of a layer whose groups have 32."""
    path = compress(tiny_model("llama", tmp_path), tmp_path / "w4a16", W4A16_ASYMMETRIC)
    workers, _ = pair.build(str(path))
    expected = generate(reference_model(path / "dequantized"), prompt(40), 12)
    assert pair.run(lambda rank: greedy(workers[rank])) == [expected, expected]
    assert workers[0].model.weights == "int4"


@pytest.mark.parametrize(
    ("kind", "changes", "wanted"),
    [("llama", {"intermediate_size": 128}, "int4"), ("gpt2", {}, "int8")],
)
def test_weights_that_are_quantized_at_load_generate_as_those_of_one_worker(
    kind: str,
    changes: dict[str, Any],
    wanted: str,
    pair: RankThreads,
    make_worker: MakeWorker,
    tmp_path: Path,
) -> None:
    path = str(tiny_model(kind, tmp_path, **changes))
    workers, _ = pair.build(path, quantization=wanted)
    expected = greedy(make_worker(kind, model=path, quantization=wanted))
    assert pair.run(lambda rank: greedy(workers[rank])) == [expected, expected]
    assert [worker.model.weights for worker in workers] == [wanted] * 2


def test_a_model_that_does_not_fit_one_workers_memory_is_served_by_two(
    pair: RankThreads,
    make_worker: MakeWorker,
    model_path: ModelPath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = model_path("llama")
    size = (path / "model.safetensors").stat().st_size
    monkeypatch.setattr(loader, "memory_limit", lambda: size - 1)
    with pytest.raises(ModelUnsupported, match=f"take {size} bytes of memory, and .* {size - 1}"):
        make_worker("llama")
    workers, _ = pair.build(str(path))
    expected = generate(reference_model(path), prompt(40), 12)
    assert pair.run(lambda rank: greedy(workers[rank])) == [expected, expected]


def test_inputs_that_are_rounded_row_by_row_are_not_split(
    pair: RankThreads, tmp_path: Path
) -> None:
    path = compress(tiny_model("llama", tmp_path), tmp_path / "w8a8", W8A8)
    with pytest.raises(ModelUnsupported, match=r"o_proj: its inputs are rounded to int8"):
        pair.build(str(path))


@pytest.mark.parametrize(
    ("kind", "num_ranks", "changes", "reason"),
    [
        ("qwen2_moe", 2, {}, "model.layers.0.mlp.gate.weight cannot be split over workers"),
        ("llama", 3, {}, "4 heads and 2 KV heads, which 3 workers cannot share"),
        ("llama", 2, {"intermediate_size": 97}, "model.layers.0.mlp has 97 features"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_by_name(
    tmp_path: Path, kind: str, num_ranks: int, changes: dict[str, Any], reason: str
) -> None:
    path = str(tiny_model(kind, tmp_path, **changes))
    config = AutoConfig.from_pretrained(path)
    with pytest.raises(ModelUnsupported, match=reason):
        SplitModel(path, config, torch.float32, Member(0, num_ranks), trust_remote_code=False)


def test_a_wrong_slice_is_refused_by_the_check_at_load(
    pair: RankThreads, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references are the whole layers'."""
    whole = Part.read

    def swapped(part: Part, stored: Any) -> torch.Tensor:
        found = whole(part, stored)
        return found.flip(0) if found.shape == (48, 64) else found  # gate and up of one rank

    monkeypatch.setattr(Part, "read", swapped)
    with pytest.raises(ModelUnsupported, match="layer 0"):
        pair.build(str(model_path("llama")), layer_kernels="off")


@pytest.mark.parametrize(
    ("in_rank_order", "shared"), [(False, False), (True, False), (False, True)]
)
def test_sums_are_equal_on_all_ranks_bit_for_bit(in_rank_order: bool, shared: bool) -> None:
    three = RankThreads(3)
    ranks = three.connect(in_rank_order, shared)
    # With shared memory: more than two of its chunks.
    size = 2 * CHUNK_ELEMENTS + 33 if shared else 33
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def summed(rank: int) -> list[torch.Tensor]:
        reducer = ranks[rank].reducer
        return [
            reducer.sum(parts[rank].clone(), torch.float32),
            reducer.sum(parts[rank].to(torch.bfloat16), torch.bfloat16),
        ]

    first, *others = three.run(summed)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert torch.allclose(first[0], sum(parts), atol=1e-6)  # type: ignore[arg-type]
    if in_rank_order or shared:
        assert torch.equal(first[0], parts[0] + parts[1] + parts[2])
    three.close()
