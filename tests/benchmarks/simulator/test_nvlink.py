"""Steps of split models on paper: cases that can be computed by hand."""

import pytest

from benchmarks.simulator.nvlink import SplitModel, rows
from benchmarks.simulator.worker.all_reduce import one_shot, ring
from benchmarks.simulator.worker.hardware import Gpu
from benchmarks.simulator.worker.model_shapes import Model
from benchmarks.simulator.worker.worker_model import Calibration

# 1,000 weights in layers; embeddings and output layer of 100 each. 16 bytes of KV per token.
MODEL = Model("tiny", 1, 10, 4, 4, 1, 42, 2, 10, 100, False)
GPU = Gpu("slow", 10_000, 2_200.0, 100_000.0, 1_000.0, 500.0)
EXACT = Calibration(
    flops_share=1, attention_flops_share=1, memory_share=1, pass_s=0, row_s=0, page_s=0
)


def split(num_gpus: int, calibration: Calibration = EXACT) -> SplitModel:
    return SplitModel(MODEL, GPU, num_gpus, calibration)


def test_each_gpu_reads_its_layers_and_the_whole_output_layer() -> None:
    alone, halved = split(1).decode(1, 0), split(2).decode(1, 0)
    assert alone.step_s == pytest.approx(2 * 1_100 / 2_200)
    assert halved.step_s == pytest.approx(2 * (500 + 100) / 2_200 + halved.one_shot_s)


def test_two_sums_of_float32_for_each_layer_and_token() -> None:
    found = split(4).decode(3, 0)
    assert found.ring_s == pytest.approx(2 * ring(4).seconds(3 * 10 * 4))
    assert found.one_shot_s == pytest.approx(2 * one_shot(4).seconds(3 * 10 * 4))
    assert found.sums_share == pytest.approx(found.one_shot_s / found.step_s)


def test_keys_and_values_are_divided() -> None:
    without, found = split(4).decode(2, 0), split(4).decode(2, 50)
    assert found.step_s - without.step_s == pytest.approx(2 * 50 * 16 / 4 / 2_200)


def test_a_prompt_multiplies_its_pairs_of_tokens_on_all_gpus() -> None:
    # 100 tokens x 1,000 weights and one row of logits on each GPU; 5,050 pairs of 16 operations
    found = split(2).prompt(100)
    computed = 2 * 100 * 1_000 / 200_000 + 2 * 100 / 100_000 + 5_050 * 16 / 200_000
    assert found.step_s == pytest.approx(computed + min(found.ring_s, found.one_shot_s))
    assert found.num_tokens == 100


def test_blocks_are_what_weights_and_copies_of_the_vocabulary_leave() -> None:
    assert split(1).num_blocks == (9_000 - 2 * 1_200) // 16 // 16
    assert split(2).num_blocks == (18_000 - 2 * 1_000 - 2 * 2 * 200) // 16 // 16


def test_the_table_marks_what_does_not_fit() -> None:
    small = Gpu("small", 2_000, 2_200.0, 100_000.0, 1_000.0, 500.0)
    found = rows(MODEL, small, [1, 4], [1, 400], 16, 16, EXACT)
    assert found[0] == ["tiny", "1", "does not fit"]
    assert [row[2] for row in found[1:]] == [
        "decode, 1",
        "decode, 400 (too many blocks)",
        "prompt, 16",
    ]
