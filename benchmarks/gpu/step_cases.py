"""The cases of the worker benchmark, and how one case is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.device_limits import Ceilings, LlamaWork
from benchmarks.gpu.generate_baselines import BaselineRun
from benchmarks.gpu.step_report import BaselineRow, Spread, WorkerRow
from benchmarks.gpu.time_budget import TimeBudget
from benchmarks.micro.driven_worker import (
    DrivenRun,
    DrivenStep,
    DrivenWorker,
    random_prompts,
    steady_steps,
)
from benchmarks.models.random_model import SHAPES, Shape
from shared.codec import IntArray
from shared.errors import PageStreamError

# A run of a case fits if this multiple of the last run's time is left.
_RUN_GROWTH = 1.5
# Greedy tokens of two correct programs diverge where rounding decides, and with random weights no
# token is far ahead. But of many first tokens, most are the same.
_LEAST_SAME_FIRST_TOKENS = 0.2
_MANY = 8
# Models whose times are meaningless.
_TO_TRY = ("tiny", "paged")


class MeasurementFailed(PageStreamError):
    """The measured steps are not of the intended kind."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Sizes of all cases.

    Attributes:
        batches: numbers of sequences that decode together.
        prompt_tokens: of each sequence; decoding begins there.
        warm_up_steps: decode steps of each run that do not count.
        steps: decode steps that count.
        runs: of each case of ours.
        prefills: lengths of single prompts.
        chunk_tokens: most tokens of a step.
        generate: batches for ``generate``.
        continuous: batches for continuous batching, the most important first.
        baseline_runs: of each case of a baseline.
        bandwidth_bytes: to copy and read.
        matrix: rows of the square matrices to multiply.
        wanted_share: of the limit, at batches of at most ``wanted_up_to``; None: no target.
        wanted_ratio: target ratio to continuous batching.
    """

    batches: tuple[int, ...]
    prompt_tokens: int
    warm_up_steps: int
    steps: int
    runs: int
    prefills: tuple[int, ...]
    chunk_tokens: int
    generate: tuple[int, ...]
    continuous: tuple[int, ...]
    baseline_runs: int
    bandwidth_bytes: int
    matrix: int
    wanted_share: float | None = None
    wanted_up_to: int = 32
    wanted_ratio: float | None = None

    def new_tokens(self, batch: int) -> int:
        """Tokens that each sequence generates, so that all decode together for long enough.

        While the last prompts are computed, the first sequences decode already.
        """
        free = max(1, self.chunk_tokens - batch)
        lead = -(-batch * self.prompt_tokens // free)
        return lead + 2 + self.warm_up_steps + self.steps

    def pool_blocks(self, block_size: int) -> int:
        """Blocks that the largest case needs."""
        most = max(
            batch * -(-(self.prompt_tokens + self.new_tokens(batch)) // block_size)
            for batch in self.batches
        )
        return max(most, -(-max(self.prefills) // block_size)) + 1

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        longest = self.prompt_tokens + max(map(self.new_tokens, self.batches))
        return max(longest, max(self.prefills) + 1)


FULL_SUITE = Suite(
    batches=(1, 8, 32, 128, 256),
    prompt_tokens=1_024,
    warm_up_steps=8,
    steps=48,
    runs=3,
    prefills=(512, 2_048, 8_192),
    chunk_tokens=8_192,
    generate=(32, 8, 1),
    continuous=(32, 8, 1, 128),
    baseline_runs=2,
    bandwidth_bytes=2 * 2**30,
    matrix=8_192,
    wanted_share=0.85,
    wanted_ratio=3.0,
)
TINY_SUITE = Suite(
    batches=(1, 3),
    prompt_tokens=24,
    warm_up_steps=2,
    steps=6,
    runs=2,
    prefills=(16, 40),
    chunk_tokens=64,
    generate=(3, 1),
    continuous=(3, 1),
    baseline_runs=2,
    bandwidth_bytes=2**20,
    matrix=64,
)


def shape_and_suite(name: str) -> tuple[Shape, Suite]:
    """Sizes of the model and of the suite."""
    shape = SHAPES[name]
    suite = TINY_SUITE if name in _TO_TRY else FULL_SUITE
    vocabulary = 128_256 if name == "8b" else shape.vocabulary  # as in Llama 3
    context = max(shape.context, suite.context)
    sizes = (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.ffn)
    return Shape(*sizes, vocabulary=vocabulary, context=context), suite


@dataclass(frozen=True, slots=True)
class Bench:
    """The objects that all cases share."""

    suite: Suite
    work: LlamaWork
    ceilings: Ceilings
    budget: TimeBudget

    def prompts(self, batch: int, num_tokens: int, run: int) -> list[IntArray]:
        """The prompts of a case, the same for every system."""
        return random_prompts(batch, num_tokens, self.work.shape.vocabulary, run)

    def repeat(self, runs: int, call: Callable[[int], None]) -> None:
        """Repeat as often as wanted while there is time, and at least once."""
        for run in range(runs):
            before_s = self.budget.left_s
            call(run)
            taken_s = before_s - self.budget.left_s
            if self.budget.left_s < _RUN_GROWTH * taken_s:
                return


@dataclass(frozen=True, slots=True)
class Decoded:
    """A case of ours and its outputs in each run, for comparison with baselines."""

    row: WorkerRow
    outputs: tuple[tuple[tuple[int, ...], ...], ...]  # by run, by sequence


def measure_decode(bench: Bench, driven: DrivenWorker, batch: int) -> Decoded:
    """Measure steps in which so many sequences decode.

    Raises:
        MeasurementFailed: outputs have wrong lengths, or preemptions kept the sequences from
            decoding together.
    """
    suite = bench.suite
    num_new = suite.new_tokens(batch)
    driven.run(bench.prompts(batch, suite.prompt_tokens, suite.runs), num_new)  # warms up
    runs: list[DrivenRun] = []

    def run(number: int) -> None:
        runs.append(driven.run(bench.prompts(batch, suite.prompt_tokens, number), num_new))

    bench.repeat(suite.runs, run)
    for each in runs:
        _require_lengths(each.outputs, batch, num_new, bench.work.shape.vocabulary)
    pairs = [steady_steps(each.steps, batch, suite.warm_up_steps, suite.steps) for each in runs]
    if not all(pairs):
        raise MeasurementFailed(f"{batch} sequences never just decoded together")
    steps = [pair for found in pairs for pair in found]
    ms = Spread.of([_median_ms(found) for found in pairs])
    context = float(np.mean([step.num_context for _, step in steps]))
    work = bench.work.decode(batch, round(context))
    limit_ms = 1e3 * work.limit_s(bench.ceilings)
    row = WorkerRow(
        case="decode",
        batch=batch,
        prompt_tokens=suite.prompt_tokens,
        output_tokens=num_new,
        mean_context=context / batch,
        runs=len(runs),
        steps=len(steps),
        ms=ms,
        whole_ms=Spread.of([1e3 * each.whole_s for each in runs]),
        tokens_per_s=1e3 * batch / ms.median,
        model_ms=1e3 * float(np.median([step.model_s for _, step in steps])),
        planning_ms=1e3 * float(np.median([_planning_s(step) for _, step in steps])),
        limit_ms=limit_ms,
        limited_by=work.limited_by(bench.ceilings),
        share_of_limit=limit_ms / ms.median,
        wanted_share=suite.wanted_share if batch <= suite.wanted_up_to else None,
    )
    return Decoded(row, tuple(each.outputs for each in runs))


def measure_prefill(bench: Bench, driven: DrivenWorker, num_tokens: int) -> Decoded:
    """Measure the steps that compute one prompt and its first token.

    Raises:
        MeasurementFailed: a run does not give one token.
    """
    suite = bench.suite
    driven.run(bench.prompts(1, num_tokens, suite.runs), 1)  # warms up
    runs: list[DrivenRun] = []

    def run(number: int) -> None:
        runs.append(driven.run(bench.prompts(1, num_tokens, number), 1))

    bench.repeat(suite.runs, run)
    for each in runs:
        _require_lengths(each.outputs, 1, 1, bench.work.shape.vocabulary)
    steps = [step for each in runs for step in each.steps]
    ms = Spread.of([1e3 * sum(map(_executing_s, each.steps)) for each in runs])
    work = bench.work.prefill(num_tokens)
    limit_ms = 1e3 * work.limit_s(bench.ceilings)
    row = WorkerRow(
        case="prefill",
        batch=1,
        prompt_tokens=num_tokens,
        output_tokens=1,
        mean_context=num_tokens / 2,
        runs=len(runs),
        steps=len(steps),
        ms=ms,
        whole_ms=Spread.of([1e3 * each.whole_s for each in runs]),
        tokens_per_s=1e3 * num_tokens / ms.median,
        model_ms=1e3 * float(np.median([sum(s.model_s for s in each.steps) for each in runs])),
        planning_ms=1e3 * float(np.median([_planning_s(step) for step in steps])),
        limit_ms=limit_ms,
        limited_by=work.limited_by(bench.ceilings),
        share_of_limit=limit_ms / ms.median,
        wanted_share=None,
    )
    return Decoded(row, tuple(each.outputs for each in runs))


Generate = Callable[[Sequence[IntArray], int], BaselineRun]


def measure_baseline(
    bench: Bench, name: str, generate: Generate, ours: Decoded, wanted_ratio: float | None = None
) -> BaselineRow:
    """Run the same prompts with a baseline.

    Raises:
        MeasurementFailed: its outputs have other lengths than ours, or nothing in common with them.
    """
    row, suite = ours.row, bench.suite
    runs: list[BaselineRun] = []

    def run(number: int) -> None:
        prompts = bench.prompts(row.batch, row.prompt_tokens, number)
        runs.append(generate(prompts, row.output_tokens))

    bench.repeat(min(suite.baseline_runs, len(ours.outputs)), run)
    for each in runs:
        _require_lengths(each.outputs, row.batch, row.output_tokens, bench.work.shape.vocabulary)
    first, same = _agreement(runs, ours.outputs)
    if len(runs) * row.batch >= _MANY and first < _LEAST_SAME_FIRST_TOKENS:
        raise MeasurementFailed(f"{name}: only {first:.0%} of the first tokens are ours")
    whole = Spread.of([1e3 * each.whole_s for each in runs])
    if row.case == "decode":
        steady = [each.decode_s[suite.warm_up_steps :] for each in runs]
        if not all(steady):
            raise MeasurementFailed(f"{name}: {row.batch} sequences hardly decoded together")
        ms = Spread.of([1e3 * float(np.median(found)) for found in steady])
        num_tokens = row.batch
    else:
        ms, num_tokens = whole, row.prompt_tokens
    return BaselineRow(
        name=name,
        how=runs[0].how,
        ms=ms,
        whole_ms=whole,
        tokens_per_s=1e3 * num_tokens / ms.median,
        ratio=ms.median / row.ms.median,
        whole_ratio=whole.median / row.whole_ms.median,
        wanted_ratio=wanted_ratio,
        same_first_tokens=first,
        same_tokens=same,
    )


def _agreement(
    runs: Sequence[BaselineRun], ours: Sequence[Sequence[tuple[int, ...]]]
) -> tuple[float, float]:
    """Shares of first tokens, and of all tokens, that are equal."""
    pairs = [
        (theirs, own)
        for run, outputs in zip(runs, ours, strict=False)
        for theirs, own in zip(run.outputs, outputs, strict=True)
    ]
    first = np.mean([theirs[0] == own[0] for theirs, own in pairs])
    same = np.mean([np.mean(np.array(theirs) == np.array(own)) for theirs, own in pairs])
    return float(first), float(same)


def _require_lengths(
    outputs: Sequence[tuple[int, ...]], batch: int, num_new: int, vocabulary: int
) -> None:
    lengths = {len(tokens) for tokens in outputs}
    if len(outputs) != batch or lengths != {num_new}:
        raise MeasurementFailed(
            f"{len(outputs)} answers of {sorted(lengths)} tokens instead of {batch} of {num_new}"
        )
    if not all(0 <= token < vocabulary for tokens in outputs for token in tokens):
        raise MeasurementFailed(f"tokens outside of the vocabulary of {vocabulary}")


def _median_ms(pairs: Sequence[tuple[DrivenStep, DrivenStep]]) -> float:
    return 1e3 * float(np.median([step.ended_s - before.ended_s for before, step in pairs]))


def _planning_s(step: DrivenStep) -> float:
    return step.planned_s - step.began_s


def _executing_s(step: DrivenStep) -> float:
    return step.ended_s - step.planned_s
