"""Measures the KV blocks that the sequences of a request share (PagedAttention, Fig. 15).

    python -m benchmarks.micro.block_sharing [--trace-dir DIR] [--datasets alpaca sharegpt] [--json]

Requests with the lengths of the paper's datasets run through the real scheduler and the real
worker: with several samples each, then as beam searches. The prefix cache is off, so that only
sharing within a request counts. After every step, the references of all block tables are compared
with the blocks in use. The saving is the sum of the differences over all steps, divided by the sum
of the references, which is what would be needed without sharing.

Prompts are sampled from the model at temperature 1, so that beams continue text of its own kind.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.micro.live_run import run_live
from benchmarks.models.model_folder import MODEL_HELP, model_folder
from benchmarks.simulator.lengths import DATASETS, Dataset, Lengths
from benchmarks.simulator.options import whole
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from scheduler_svc.core.events import Stats
from scheduler_svc.replay import replay
from scheduler_svc.settings import SchedulerSettings
from shared.errors import PageStreamError
from shared.messages.requests import Submit
from shared.sampling import BeamParams, EarlyStopping, SamplingParams
from shared.service_settings import DEMO_MODEL

_BLOCK_SIZE = 16
_BEGIN = (0,)  # the demo model's <|bos|>
_WIDTHS = (2, 4, 6)
_MAX_SEQUENCES = 96  # at once; a multiple of every width
_SAMPLES, _BEAMS = "samples", "beams"
_PAPER_PERCENT = {  # section 6.3; for ShareGPT only the range is given
    ("alpaca", _SAMPLES): (6.09, 8.53, 9.79),
    ("alpaca", _BEAMS): (37.56, 53.13, 55.16),
    ("sharegpt", _SAMPLES): (16.2, None, 30.5),
    ("sharegpt", _BEAMS): (44.3, None, 66.3),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One bar of the figure."""

    dataset: str
    method: str  # samples or beams
    width: int  # sequences of a request

    def paper_percent(self) -> float | None:
        """The paper's result, where it is printed."""
        return _PAPER_PERCENT[self.dataset, self.method][_WIDTHS.index(self.width)]

    def sampling(self, num_tokens: int, seed: int) -> SamplingParams:
        """Sampling parameters for sequences of exactly this length."""
        if self.method == _SAMPLES:
            return _sampling(num_tokens, temperature=1.0, seed=seed)
        beams = BeamParams(self.width, 1.0, EarlyStopping.ESTIMATED)
        return _sampling(num_tokens, temperature=0.0, seed=0, beams=beams)


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of a case."""

    case: Case
    percents: tuple[float, ...]  # saved, of each run

    def mean(self) -> float:
        """Mean over all runs."""
        return float(np.mean(self.percents))


def percent_saved(moments: Iterable[Stats]) -> float:
    """Blocks saved by sharing, in percent of those needed without sharing.

    Args:
        moments: the pool after each step; each is weighted by the blocks needed without sharing.

    Raises:
        ValueError: no block was ever used.
    """
    num_saved = num_used = 0
    for stats in moments:
        num_saved += stats.num_shared_blocks
        num_used += stats.num_used_blocks
    if not num_used:
        raise ValueError("no block was ever used")
    return 100 * num_saved / (num_saved + num_used)


class Bench:
    """One loaded model, and requests for it.

    Args:
        model: folder or hub id.
        trace_dir: folder with the traces; None for look-alikes.
        num_requests: in each run.
        progress: shows the progress of the runs.
    """

    def __init__(
        self, model: str, trace_dir: Path | None, num_requests: int, progress: Progress
    ) -> None:
        self._trace_dir = trace_dir
        self._num_requests = num_requests
        self._progress = progress
        self._worker = _load(model)

    def run(self, datasets: Sequence[Dataset], num_runs: int) -> list[Row]:
        """Run all cases; each run draws requests of its own, which its cases share."""
        found: dict[Case, list[float]] = {}
        for dataset in datasets:
            for number in range(num_runs):
                name = f"{dataset.name}, run {number + 1}"
                lengths = self._lengths(dataset, np.random.default_rng(number))
                prompts = self._prompts(lengths, f"{name}: prompts")
                for method in (_SAMPLES, _BEAMS):
                    for width in _WIDTHS:
                        case = Case(dataset.name, method, width)
                        title = f"{name}: {width} {method}"
                        percent = self._measure(case, lengths, prompts, title)
                        found.setdefault(case, []).append(percent)
        return [Row(case, tuple(percents)) for case, percents in found.items()]

    def _lengths(self, dataset: Dataset, random: np.random.Generator) -> list[Lengths]:
        count, limit = self._num_requests, self._worker.model.max_model_len
        if self._trace_dir is None:
            return dataset.draw(count, limit, random)
        return dataset.draw_from(self._trace_dir, count, limit, random)

    def _prompts(self, lengths: Sequence[Lengths], title: str) -> list[list[int]]:
        """Prompts sampled from the model, [length] each; the first token begins a document."""
        submits = [
            _submit(number, _BEGIN, _sampling(each.prompt, temperature=1.0, seed=number))
            for number, each in enumerate(lengths)
        ]
        with tempfile.TemporaryDirectory() as folder:
            outputs = self._live(submits, Path(folder) / "recording", title)
        return [[*_BEGIN, *outputs[submit.request_id][:-1]] for submit in submits]

    def _measure(
        self, case: Case, lengths: Sequence[Lengths], prompts: Sequence[list[int]], title: str
    ) -> float:
        submits = [
            _submit(number, prompt, case.sampling(each.output, number), case.width)
            for number, (each, prompt) in enumerate(zip(lengths, prompts, strict=True))
        ]
        with tempfile.TemporaryDirectory() as folder:
            recording = Path(folder) / "recording"
            self._live(submits, recording, title)
            percent = percent_saved(moment.stats for moment in replay(recording))
        self._progress.console.print(f"{title}: {percent:.1f} % saved")
        return percent

    def _live(self, submits: Sequence[Submit], recording: Path, title: str) -> dict[str, list[int]]:
        settings = SchedulerSettings(
            max_num_sequences=_MAX_SEQUENCES,
            max_num_batched_tokens=1_024,
            prefix_caching=False,
            outputs_retention=100,
        )
        task = self._progress.add_task(title, total=len(submits))
        on_ended = partial(self._progress.advance, task)
        return asyncio.run(run_live(self._worker, settings, submits, recording, on_ended))


def _load(model: str) -> Worker:
    """Load with a pool so large that no request waits for blocks or is preempted."""
    longest = 2_048
    num_blocks = (_MAX_SEQUENCES + 2) * (longest // _BLOCK_SIZE)
    return build_worker(
        WorkerSettings(
            model=model,
            block_size=_BLOCK_SIZE,
            num_blocks=num_blocks,
            num_host_blocks=0,
            max_model_len=longest,
        )
    )


def _sampling(
    num_tokens: int, temperature: float, seed: int, beams: BeamParams | None = None
) -> SamplingParams:
    greedy = SamplingParams.greedy(num_tokens)
    return replace(greedy, temperature=temperature, seed=seed, beams=beams)


def _submit(
    number: int, prompt: Sequence[int], sampling: SamplingParams, num_choices: int = 1
) -> Submit:
    return Submit(
        request_id=f"r{number}",
        gateway="benchmark",
        attachment="a",
        prompt=np.array(prompt, np.int32),
        sampling=sampling,
        received_ms=0,
        num_choices=num_choices,
        priority=0,
        cache_salt="",
    )


def main() -> None:
    """Measure and print a table, or one JSON object; exits with 1 on an error."""
    names = [dataset.name for dataset in DATASETS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace-dir", type=Path, help="folder with the traces' lengths")
    parser.add_argument("--datasets", nargs="+", choices=names, default=names)
    parser.add_argument("--model", type=model_folder, default=DEMO_MODEL, help=MODEL_HELP)
    parser.add_argument("--requests", type=whole, default=96, help="requests of each run")
    parser.add_argument("--runs", type=whole, default=3, help="runs, each with other requests")
    args = parser.parse_args()
    datasets = [dataset for dataset in DATASETS if dataset.name in args.datasets]
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bench = Bench(args.model, args.trace_dir, args.requests, progress)
            rows = bench.run(datasets, args.runs)
    except PageStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(json.dumps(as_json(rows)) if args.json else as_table(rows))


def as_json(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    """Savings in percent by dataset, method and number of sequences."""
    found: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    for row in rows:
        case = row.case
        found.setdefault(case.dataset, {}).setdefault(case.method, {})[str(case.width)] = {
            "percent": round(row.mean(), 2),
            "runs": [round(percent, 2) for percent in row.percents],
            "paper_percent": case.paper_percent(),
        }
    return found


def as_table(rows: Sequence[Row]) -> str:
    """One line per case: the mean of all runs, the lowest and the highest, and the paper's."""
    lines = [f"{'blocks saved, %':<24}{'paper':>8}{'ours':>8}{'from':>8}{'to':>8}"]
    for row in rows:
        case, paper = row.case, row.case.paper_percent()
        name = f"{case.dataset}, {case.width} {case.method}"
        printed = "-" if paper is None else f"{paper:.1f}"
        ours = (row.mean(), min(row.percents), max(row.percents))
        lines.append(f"{name:<24}{printed:>8}" + "".join(f"{value:>8.1f}" for value in ours))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
