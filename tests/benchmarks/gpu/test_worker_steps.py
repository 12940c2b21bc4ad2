"""The worker benchmark without a GPU: its counting, and a run on a tiny model."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, ContinuousBatchingManager

from benchmarks.gpu.device_limits import Ceilings, LlamaWork, Work
from benchmarks.gpu.generate_baselines import BaselineRun, Transformers, steps_together
from benchmarks.gpu.step_cases import (
    FULL_SUITE,
    TINY_SUITE,
    Bench,
    Decoded,
    MeasurementFailed,
    measure_baseline,
    shape_and_suite,
)
from benchmarks.gpu.step_report import Spread, WorkerRow, as_table
from benchmarks.gpu.time_budget import TimeBudget
from benchmarks.gpu.worker_steps import DeviceFault, Run, main
from benchmarks.micro.driven_worker import DrivenStep, random_prompts, steady_steps
from benchmarks.models.random_llama import register, write_config
from benchmarks.models.random_model import SHAPES, Shape

ROOT = Path(__file__).parents[3]
TINY = SHAPES["tiny"]
CEILINGS = Ceilings(copied_bytes_per_s=4e12, read_bytes_per_s=2e12, operations_per_s=8e14)


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def random_llama(folder: Path, seed: int, shape: Shape = TINY) -> torch.nn.Module:
    register()
    write_config(folder, shape, torch.bfloat16, torch.device("cpu"), seed)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def step(num_rows: int, ended_s: float, only_decodes: bool = True) -> DrivenStep:
    return DrivenStep(num_rows, only_decodes, 0, ended_s - 1, ended_s - 1, ended_s, 0.5)


def row(**changes: object) -> WorkerRow:
    plain = WorkerRow(
        case="decode",
        batch=2,
        prompt_tokens=24,
        output_tokens=3,
        mean_context=25.0,
        runs=1,
        steps=2,
        ms=Spread(2.0, 1.5, 2.5),
        whole_ms=Spread(10.0, 9.0, 11.0),
        tokens_per_s=1_000.0,
        model_ms=1.5,
        planning_ms=0.1,
        limit_ms=1.0,
        limited_by="bandwidth",
        share_of_limit=0.5,
        wanted_share=0.85,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def bench(budget: TimeBudget | None = None) -> Bench:
    return Bench(TINY_SUITE, LlamaWork(TINY, 4), CEILINGS, budget or TimeBudget(60))


def test_the_same_seed_gives_the_same_weights_and_no_file_holds_them(tmp_path: Path) -> None:
    models = [random_llama(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    first, same, other = (dict(model.state_dict()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["lm_head.weight"].std() > 0
    assert max(file.stat().st_size for file in (tmp_path / "a").iterdir()) < 10_000


def test_a_step_reads_all_weights_but_the_embedding(tmp_path: Path) -> None:
    model = random_llama(tmp_path, 0)
    weights = {name: weight.nbytes for name, weight in model.named_parameters()}
    embedding = weights.pop("model.embed_tokens.weight")
    assert embedding == TINY.vocabulary * TINY.hidden * 4
    assert LlamaWork(TINY, 4).weight_bytes == sum(weights.values())


def test_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    model = random_llama(tmp_path, 0)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    num_tokens = 7
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(num_tokens)[None], logits_to_keep=1, use_cache=False)
    # Eager attention computes all pairs of tokens; the benchmark counts visible pairs.
    unseen = num_tokens * (num_tokens - 1) // 2 * LlamaWork(TINY, 4).decode(0, 1).operations
    rope = num_tokens * TINY.hidden // TINY.heads  # its angles may be a matrix product, too
    found = LlamaWork(TINY, 4).prefill(num_tokens).operations
    assert found <= counter.get_total_flops() - unseen <= found + rope


def test_a_decoding_step_reads_keys_and_values_of_its_context() -> None:
    work = LlamaWork(TINY, 2)
    assert work.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    alone, two = work.decode(1, 100), work.decode(2, 300)
    assert two.read_bytes - alone.read_bytes == 200 * work.kv_bytes_per_token
    assert two.operations == 2 * alone.operations + 100 * work.decode(0, 1).operations


def test_the_limit_is_the_slower_of_reading_and_computing() -> None:
    reading = Work(read_bytes=8 * 10**12, operations=8 * 10**14)
    assert (reading.limit_s(CEILINGS), reading.limited_by(CEILINGS)) == (2.0, "bandwidth")
    computing = Work(read_bytes=8 * 10**12, operations=24 * 10**14)
    assert (computing.limit_s(CEILINGS), computing.limited_by(CEILINGS)) == (3.0, "compute")


def test_the_8b_shape_is_llamas() -> None:
    shape, suite = shape_and_suite("8b")
    sizes = (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.ffn, shape.vocabulary)
    assert sizes == (4_096, 32, 32, 8, 14_336, 128_256)
    assert shape.context > max(suite.prefills)
    work = LlamaWork(shape, 2)
    assert work.kv_bytes_per_token == 128 * 1024
    assert 14.9e9 < work.weight_bytes < 15.1e9
    assert suite.pool_blocks(16) * 16 * work.kv_bytes_per_token < 45e9, "the baselines need room"


def test_only_steps_in_which_all_do_nothing_but_decode_count() -> None:
    steps = [step(1, 1.0, False), step(2, 2.0, False), step(2, 3.0), step(2, 4.0), step(2, 6.0)]
    steps += [step(2, 9.0), step(1, 10.0), step(2, 11.0)]
    found = steady_steps(steps, 2, num_warm_up=1, most=5)
    assert [after.ended_s - before.ended_s for before, after in found] == [2.0, 3.0]
    assert steady_steps(steps, 2, num_warm_up=0, most=1) == [(steps[2], steps[3])]


def test_a_baselines_steps_count_while_all_decode() -> None:
    moments = [[1.0, 2.0, 3.5, 4.5, 5.5], [3.5, 4.5, 5.5, 7.0, 8.0]]
    assert steps_together(moments) == (1.0, 1.0)


def test_enough_tokens_are_generated_for_all_to_decode_together() -> None:
    for suite in (FULL_SUITE, TINY_SUITE):
        for batch in suite.batches:
            prefill_steps = batch * suite.prompt_tokens / (suite.chunk_tokens - batch)
            wanted = prefill_steps + suite.warm_up_steps + suite.steps
            assert suite.new_tokens(batch) > wanted


def baseline_of(outputs: Sequence[tuple[int, ...]]) -> BaselineRun:
    return BaselineRun("somehow", tuple(outputs), (1.0, 1.0, 0.004, 0.004), 0.03)


def test_a_baseline_is_compared_by_its_steady_steps_and_its_whole_time() -> None:
    ours = Decoded(row(), (((1, 2, 3), (4, 5, 6)),))
    found = measure_baseline(
        bench(), "other", lambda *_: baseline_of([(1, 2, 3), (4, 5, 7)]), ours, wanted_ratio=3.0
    )
    assert (found.ms.median, found.ratio, found.whole_ratio) == (4.0, 2.0, 3.0)
    assert (found.tokens_per_s, found.same_first_tokens) == (500.0, 1.0)
    assert found.same_tokens == pytest.approx(5 / 6)
    missed = row(baselines=(found,)).missed
    assert missed == ("share of limit 0.50 < 0.85", "other 2.00 < 3.00")
    lines = as_table([row(baselines=(found, found)), row()]).splitlines()
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([(1, 2, 3), (4, 5)], "instead of 2 of 3"),
        ([(1, 2, 3)], "1 answers"),
        ([(1, 2, 3), (4, 5, 1_024)], "outside of the vocabulary"),
    ],
)
def test_a_baseline_that_answers_something_else_has_no_time(
    outputs: list[tuple[int, ...]], reason: str
) -> None:
    ours = Decoded(row(), (((1, 2, 3), (4, 5, 6)),))
    with pytest.raises(MeasurementFailed, match=reason):
        measure_baseline(bench(), "other", lambda *_: baseline_of(outputs), ours)


def test_a_baseline_that_never_begins_like_ours_computes_something_else() -> None:
    answers = [(number, 2, 3) for number in range(8)]
    ours = Decoded(row(batch=8), (tuple(answers),))
    others = [(number + 1, 2, 3) for number in range(8)]
    others[0] = answers[0]
    with pytest.raises(MeasurementFailed, match="only 12% of the first tokens"):
        measure_baseline(bench(), "other", lambda *_: baseline_of(others), ours)
    found = measure_baseline(
        bench(), "other", lambda *_: baseline_of(answers[:2] + others[2:]), ours
    )
    assert (found.same_first_tokens, found.same_tokens) == (0.25, 0.75)


def test_what_does_not_fit_into_the_time_is_named_and_not_begun(tmp_path: Path) -> None:
    clock = Clock()
    file = tmp_path / "figures.json"
    run = Run(file, {"machine": "none"}, TimeBudget(100, clock))
    begun: list[str] = []

    def take(name: str, seconds: float) -> bool:
        def part() -> None:
            begun.append(name)
            clock.now_s += seconds

        return run.part(name, "kind", part)

    assert [take("a", 30), take("b", 30), take("c", 30)] == [True, True, False]
    assert run.part("of another kind", "other", lambda: None)
    assert begun == ["a", "b"]
    missing = json.loads(file.read_text())["missing"]
    assert missing == [{"part": "c", "reason": "no time was left"}]


def test_runs_are_fewer_where_time_is_short() -> None:
    def runs_within(seconds: float) -> int:
        clock, found = Clock(), 0

        def call(_: int) -> None:
            nonlocal found
            found += 1
            clock.now_s += 10

        bench(TimeBudget(seconds, clock)).repeat(5, call)
        return found

    assert [runs_within(seconds) for seconds in (0, 24, 26, 1_000)] == [1, 1, 2, 5]


def test_a_part_that_fails_takes_no_other_with_it() -> None:
    run = Run(None, {}, TimeBudget(60))

    def fail() -> None:
        raise RuntimeError("no such kernel\nand much more")

    assert not run.part("first", "kind", fail)
    assert run.part("second", "kind", lambda: None)
    assert [(part.part, part.reason) for part in run.missing] == [
        ("first", "RuntimeError: no such kernel")
    ]


def test_a_part_that_breaks_the_device_is_named_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    file = tmp_path / "figures.json"
    with pytest.raises(DeviceFault, match="decode"):
        Run(file, {}, TimeBudget(60)).part("decode", "kind", fail)
    (missing,) = json.loads(file.read_text())["missing"]
    assert (missing["part"], "illegal memory access" in missing["reason"]) == ("decode", True)


def test_a_part_to_skip_is_listed_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    run = Run(file, {}, TimeBudget(60), ["decode"])
    assert not run.part("decode", "kind", lambda: pytest.fail("it was run"))
    assert run.part("prefill", "kind", lambda: None)
    assert json.loads(file.read_text())["missing"] == [{"part": "decode", "reason": "skipped"}]


def test_prompts_are_the_same_for_every_system_and_share_nothing() -> None:
    first, again = (random_prompts(3, 20, 50, seed) for seed in (1, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, random_prompts(3, 20, 50, 2))
    assert len({tuple(prompt[:5].tolist()) for prompt in first}) == 3


def test_a_baseline_that_does_not_start_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_llama(tmp_path, 0)
    model = Transformers(tmp_path, torch.float32, torch.device("cpu"), 64)
    prompts = random_prompts(2, 10, TINY.vocabulary, 0)
    before = model.generate(prompts, 3)

    def fail(_: ContinuousBatchingManager) -> None:
        raise MemoryError("too little")

    monkeypatch.setattr(ContinuousBatchingManager, "warmup", fail)
    with pytest.raises(MemoryError):
        model.continuous(prompts, 3)
    after = model.generate(prompts, 3)
    assert (after.how, after.outputs) == (before.how, before.outputs)


@pytest.fixture(scope="module")
def figures(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, object]]]:
    """The results of a run on a tiny model, in float32, where equal programs give equal tokens."""
    file = tmp_path_factory.mktemp("worker") / "figures.json"
    flags = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--layer-kernels", "off"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.worker_steps", *flags, "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_all_of_it_runs_on_a_tiny_model(figures: dict[str, list[dict[str, object]]]) -> None:
    assert figures["missing"] == []
    rows = figures["rows"]
    cases = [(found["case"], found["batch"], found["prompt_tokens"]) for found in rows]
    assert cases == [
        ("decode", 1, 24),
        ("decode", 3, 24),
        ("prefill", 1, 16),
        ("prefill", 1, 40),
    ]
    for found in rows[:2]:
        assert found["runs"] == TINY_SUITE.runs
        assert found["steps"] == TINY_SUITE.runs * TINY_SUITE.steps
        prompt, warm_up = TINY_SUITE.prompt_tokens, TINY_SUITE.warm_up_steps
        assert prompt + warm_up < found["mean_context"] < prompt + found["output_tokens"]  # type: ignore[operator]


def test_transformers_gives_the_same_tokens_in_every_way(
    figures: dict[str, list[dict[str, object]]],
) -> None:
    by_case = [
        {baseline["name"]: baseline["same_tokens"] for baseline in found["baselines"]}  # type: ignore[attr-defined]
        for found in figures["rows"]
    ]
    assert by_case == [
        {"continuous batching": 1.0, "generate": 1.0},
        {"continuous batching": 1.0, "generate": 1.0},
        {"generate": 1.0},
        {"generate": 1.0},
    ]


def test_without_a_gpu_a_large_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_a_bad_setting_of_the_worker_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--shape", "tiny", "--device", "cpu", "--block-size", "7"])
    assert "--block-size" in capsys.readouterr().err
