"""Durations follow from data sheets: cases that can be computed by hand."""

import pytest

from benchmarks.simulator.system import Work
from benchmarks.simulator.worker.hardware import Gpu, find_gpu
from benchmarks.simulator.worker.model_shapes import MODELS, Model, find_model
from benchmarks.simulator.worker.worker_model import Calibration, Parts, WorkerModel
from shared.errors import SettingsError

# 1,000 weights in layers and 100 for logits; 2,200 bytes. 16 bytes of KV per token.
MODEL = Model("tiny", 1, 10, 4, 4, 1, 42, 2, 10, 100, True)
GPU = Gpu("slow", 10_000, 2_200.0, 100_000.0, 1_000.0, 500.0)
EXACT = Calibration(
    flops_share=1,
    attention_flops_share=1,
    memory_share=1,
    host_share=1,
    peer_share=1,
    pass_s=0,
    row_s=0,
    reduction_s=0,
    transfer_s=0,
    page_s=0,
)


def worker(num_gpus: int = 1, mixes_passes: bool = True, **changed: float) -> WorkerModel:
    calibration = Calibration(**{**{name: getattr(EXACT, name) for name in _NAMES}, **changed})
    return WorkerModel(MODEL, GPU, num_gpus, calibration, mixes_passes)


_NAMES = tuple(Calibration.__dataclass_fields__)


def test_the_tiny_model_has_the_weights_that_were_counted() -> None:
    assert MODEL.layer_weights == 10 * (2 * 8 + 2 * 42)
    assert MODEL.weight_bytes == 2 * 1_100
    assert MODEL.kv_bytes_per_token == 16


def test_a_small_pass_takes_as_long_as_reading_the_weights() -> None:
    assert worker().seconds(Work(decode_tokens=1, sampled_rows=1)) == pytest.approx(1.0)
    assert worker().parts(Work(decode_tokens=1)) == Parts(memory_s=pytest.approx(1.0))


def test_a_large_pass_takes_as_long_as_its_products() -> None:
    # 100 tokens x 1,000 weights x 2 operations / 100,000 per second, and one row of logits
    parts = worker().parts(Work(prefill_tokens=100, sampled_rows=1))
    assert parts.compute_s == pytest.approx(2.0 + 0.002)
    assert parts.memory_s == 0


def test_decodes_read_the_keys_and_values_that_they_attend_to() -> None:
    found = worker().seconds(Work(decode_tokens=2, decode_context=275))
    assert found == pytest.approx(1.0 + 275 * 16 / 2_200)


def test_prompts_multiply_every_pair_of_tokens() -> None:
    found = worker().seconds(Work(prefill_tokens=1, prefill_context=500))
    assert found == pytest.approx(1.0 + 500 * 4 * 4 / 100_000)


def test_two_gpus_are_twice_as_fast_but_have_to_communicate() -> None:
    # 2 reductions of 20 bytes per token, of which a ring of two sends each once
    found = worker(2).seconds(Work(decode_tokens=1))
    assert found == pytest.approx(0.5 + 2 * 20 / 500)
    assert worker(2, reduction_s=0.1).seconds(Work(decode_tokens=1)) == pytest.approx(found + 0.2)


def test_passes_that_do_not_mix_read_the_weights_twice() -> None:
    work = Work(prefill_tokens=3, decode_tokens=2, sampled_rows=3)
    assert worker().seconds(work) == pytest.approx(1.0)
    assert worker(mixes_passes=False).seconds(work) == pytest.approx(2.0)
    assert worker(mixes_passes=False, pass_s=1).seconds(work) == pytest.approx(4.0)
    assert worker(mixes_passes=False).seconds(Work(decode_tokens=2)) == pytest.approx(1.0)


def test_transfers_cost_by_their_bytes_and_by_their_number() -> None:
    many = worker(transfer_s=0.5).seconds(Work(swapped_bytes=3_000, swap_copies=4))
    assert many == pytest.approx(3.0 + 4 * 0.5)
    assert worker().swap_us_per_block(25) == pytest.approx(1e6 * 25 * 16 / 1_000)


def test_copies_read_and_write_and_mappings_count() -> None:
    assert worker().seconds(Work(copied_bytes=1_100)) == pytest.approx(1.0)
    assert worker(page_s=0.25).seconds(Work(mapped_pages=3)) == pytest.approx(0.75)


def test_rows_that_sample_cost_as_much_as_the_calibration_gives() -> None:
    work = Work(decode_tokens=5, sampled_rows=5)
    assert worker(row_s=0.1, pass_s=2).seconds(work) == pytest.approx(1.0 + 0.5 + 2.0)


def test_nothing_takes_no_time() -> None:
    assert worker(pass_s=1).seconds(Work()) == 0


def test_memory_for_keys_and_values_is_what_the_weights_leave() -> None:
    assert worker().kv_slots == (9_000 - 2_200) // 16
    with pytest.raises(ValueError, match=r"OPT-175B has .* bytes of weights"):
        _ = WorkerModel(find_model("OPT-175B"), find_gpu("H100")).kv_slots


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus", "slots", "gigabytes"),
    [
        ("OPT-13B", "A100-40G", 1, 15_700, 26),
        ("OPT-66B", "A100-40G", 4, 9_700, 132),
        ("OPT-175B", "A100-80G", 8, 60_100, 346),
    ],
)
def test_the_papers_configurations_are_as_in_its_table(
    model: str, gpu: str, num_gpus: int, slots: int, gigabytes: float
) -> None:
    found = WorkerModel(find_model(model), find_gpu(gpu), num_gpus)
    assert found.kv_slots == slots
    assert found.model.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_what_a_tokens_keys_and_values_take_is_as_published() -> None:
    assert find_model("OPT-13B").kv_bytes_per_token == 800 * 1024
    kib = {model.name: model.kv_bytes_per_token / 1024 for model in MODELS}
    assert (kib["Yi-6B"], kib["Llama-3-8B"], kib["Yi-34B"]) == (64, 128, 240)
    assert kib["Llama-3-70B"] == 320


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="--gpu='B300': known are A100-40G"):
        find_gpu("B300")
    with pytest.raises(SettingsError, match="--model='GPT-9': known are OPT-13B"):
        find_model("GPT-9")


def test_heads_are_shared_evenly_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="num_gpus=3: OPT-13B has 40 KV heads"):
        WorkerModel(find_model("OPT-13B"), find_gpu("H100"), 3)
