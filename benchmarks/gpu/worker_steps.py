"""Whole steps of the worker on a GPU, as a share of what the device allows, against transformers.

    python -m benchmarks.gpu.worker_steps [--shape 8b] [--json FILE] [--minutes 9] \\
        [any setting of the worker]

A model of Llama's shape with random weights is made on the device. The worker's executor carries
out the plans of the real scheduler core, both in this process, one after the other: decoding with 1
to 256 sequences of about 1,000 tokens, and prompts of 512 to 8,192 tokens. The limit is the longer
of the times for reading (weights, keys and values, at the best measured rate of copying or reading)
and for computing (at the rate of a dense matrix product), both measured in the same run.
Transformers' ``generate`` and continuous batching then answer the same prompts with the same
weights; their outputs must have the right lengths and begin like ours often enough.

A step's time is that from one result to the next, which contains the scheduler's part
(``planning_ms``). All figures are medians of several runs. Parts that do not fit into the time are
listed, and so are failed ones; the file is written again after every part. ``--shape tiny --device
cpu`` runs all of it on any machine; its times are meaningless.

A fault of the device ends every later call of its process, so it ends the run: start it again with
``--skip`` and the names of the parts that are done or at fault.

Exit codes: 0, whether or not targets are reached; 1 if a part failed; 2 without a GPU or with a bad
setting; 3 if a fault of the device ended the run.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks.gpu.device_limits import Ceilings, LlamaWork, measure_ceilings
from benchmarks.gpu.device_memory import free_unused
from benchmarks.gpu.generate_baselines import Transformers
from benchmarks.gpu.kernels.clock import Clock
from benchmarks.gpu.report_tables import Absent, write_json
from benchmarks.gpu.step_cases import (
    TINY_SUITE,
    Bench,
    Decoded,
    Generate,
    Suite,
    measure_baseline,
    measure_decode,
    measure_prefill,
    shape_and_suite,
)
from benchmarks.gpu.step_report import BaselineRow, WorkerRow, as_json, as_table
from benchmarks.gpu.time_budget import TimeBudget
from benchmarks.micro.driven_worker import DrivenWorker
from benchmarks.models.random_llama import register, write_config
from benchmarks.models.random_model import SHAPES, Shape
from gpu_worker.model.loader import choose_device, choose_dtype
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from shared.errors import PageStreamError, SettingsError
from shared.logs import setup_logging
from shared.settings import add_flags, exit_with, load

_NO_TIME = "no time was left"
_SKIPPED = "skipped"
_SEED = 0
# Settings of the worker that the benchmark sets itself.
_OWN = {
    *("model", "served_model_name", "num_blocks", "kv_memory_bytes", "max_model_len"),
    *("max_num_batched_tokens", "max_num_sequences"),
}


class DeviceFault(PageStreamError):
    """A part ended with a fault of the device."""


def is_device_fault(problem: Exception) -> bool:
    """Whether every later call of this process fails, too."""
    text = str(problem)
    out_of_memory = isinstance(problem, torch.OutOfMemoryError)
    return not out_of_memory and ("CUDA error" in text or "CUDA_ERROR" in text)


class Run:
    """All parts of one run, and their results so far.

    Args:
        file: written after every part; None: no file.
        about: description of the run, the machine and the model.
        budget: of time.
        skipped: names of parts that are left out.
    """

    def __init__(
        self,
        file: Path | None,
        about: dict[str, object],
        budget: TimeBudget,
        skipped: Sequence[str] = (),
    ) -> None:
        self.budget = budget
        self._skipped = frozenset(skipped)
        self.decoded: dict[tuple[str, int], Decoded] = {}  # by case, and its batch or length
        self.missing: list[Absent] = []
        self.ceilings: Ceilings | None = None
        self._file = file
        self._about = about

    @property
    def rows(self) -> list[WorkerRow]:
        """All rows with their baselines."""
        return [each.row for each in self.decoded.values()]

    def part(self, name: str, kind: str, call: Callable[[], None]) -> bool:
        """Run a part if there is time; a failure does not affect other parts.

        Returns:
            Whether it succeeded.

        Raises:
            DeviceFault: nothing that comes later can succeed.
        """
        done = False
        if name in self._skipped:
            self.miss(name, _SKIPPED)
        elif not self.budget.has_room(kind):
            self.miss(name, _NO_TIME)
        else:
            self._show(f"{name} ...")
            try:
                with self.budget.spent_on(kind):
                    call()
                done = True
            except DeviceFault:
                raise
            except Exception as problem:
                self.miss(name, f"{type(problem).__name__}: {problem}".splitlines()[0][:300])
                if is_device_fault(problem):
                    self._write()
                    raise DeviceFault(name) from problem
        free_unused()
        self._write()
        return done

    def miss(self, part: str, reason: str) -> None:
        """Record that this part has no figures."""
        self.missing.append(Absent(part, reason))
        self._show(f"{part}: {reason}")

    def add(self, key: tuple[str, int], found: Decoded) -> None:
        """Add a case of ours."""
        self.decoded[key] = found
        row = found.row
        self._show(f"{row.name}: {row.ms.median:.3f} ms, {row.share_of_limit:.2f} of the limit")

    def add_baseline(self, key: tuple[str, int], found: BaselineRow) -> None:
        """Add a baseline to its case of ours."""
        ours = self.decoded[key]
        row = replace(ours.row, baselines=(*ours.row.baselines, found))
        self.decoded[key] = replace(ours, row=row)
        self._show(f"{row.name}: {found.name} {found.ms.median:.3f} ms, ratio {found.ratio:.2f}")

    def _show(self, text: str) -> None:
        print(f"[{self.budget.left_s:5.0f} s left] {text}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        if self._file is not None:
            found = as_json(self.rows, self._about, self.ceilings, self.missing)
            write_json(self._file, found)


def measure_ours(run: Run, bench: Bench, settings: WorkerSettings) -> None:
    """Measure all cases of the worker, which is freed afterwards."""
    suite = bench.suite
    worker = build_worker(settings)
    driven = DrivenWorker(worker.executor, max(suite.batches), suite.chunk_tokens)

    def decode(batch: int) -> None:
        run.add(("decode", batch), measure_decode(bench, driven, batch))

    def prefill(num_tokens: int) -> None:
        run.add(("prefill", num_tokens), measure_prefill(bench, driven, num_tokens))

    try:
        for batch in suite.batches:
            run.part(f"decode, batch {batch}", "our decode", partial(decode, batch))
        for num_tokens in suite.prefills:
            run.part(f"prefill, {num_tokens} tokens", "our prefill", partial(prefill, num_tokens))
    finally:
        driven.close()


def measure_baselines(run: Run, bench: Bench, model: Transformers) -> None:
    """Measure all baselines, the most important first."""
    suite = bench.suite

    def baseline(name: str, call: Generate, key: tuple[str, int], wanted: float | None) -> None:
        found = measure_baseline(bench, name, call, run.decoded[key], wanted)
        run.add_baseline(key, found)

    def plan(name: str, call: Generate, case: str, size: int, wanted: float | None = None) -> None:
        key, part = (case, size), f"{name}, {case} {size}"
        if key in run.decoded:
            run.part(part, f"{name} {case}", partial(baseline, name, call, key, wanted))
        else:
            run.miss(part, "there is no figure of ours to compare it with")

    with_graphs = partial(model.continuous, use_graphs=True)
    for rank, batch in enumerate(suite.continuous):
        plan("continuous batching", model.continuous, "decode", batch, suite.wanted_ratio)
        if rank < len(suite.generate):
            plan("generate", model.generate, "decode", suite.generate[rank])
    for num_tokens in suite.prefills:
        plan("generate", model.generate, "prefill", num_tokens)
    if torch.cuda.is_available():
        name, wanted = "continuous batching with CUDA graphs", suite.wanted_ratio
        plan(name, with_graphs, "decode", suite.continuous[0], wanted)


def measure(run: Run, shape: Shape, suite: Suite, settings: WorkerSettings) -> None:
    """Measure ceilings, our cases and baselines."""
    device = choose_device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.dtype or "bfloat16")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    setup_logging("worker", settings.log_level)
    register()
    folder = Path(settings.model)
    write_config(folder, shape, dtype, device, _SEED)

    def ceilings() -> None:
        clock = Clock(device)
        found = measure_ceilings(clock, device, dtype, suite.bandwidth_bytes, suite.matrix)
        run.ceilings = found

    if not run.part("rates of the device", "rates", ceilings) or run.ceilings is None:
        return  # all results are shares of them
    bench = Bench(suite, LlamaWork(shape, dtype.itemsize), run.ceilings, run.budget)
    run.part("our worker", "worker", partial(measure_ours, run, bench, settings))

    def baselines() -> None:
        transformers.logging.set_verbosity_error()
        measure_baselines(run, bench, Transformers(folder, dtype, device, suite.chunk_tokens))

    run.part("transformers", "transformers", baselines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON if wanted.

    Args:
        arguments: of the command line; None: those of this process.
    """
    args = _parser().parse_args(arguments)
    shape, suite = shape_and_suite(args.shape)
    with tempfile.TemporaryDirectory() as folder:
        try:
            settings = _settings(vars(args), Path(folder), shape, suite)
            device = choose_device(settings.device)
        except SettingsError as error:
            exit_with(error)
        if device.type != "cuda" and args.shape != "tiny":
            print("benchmarks.gpu.worker_steps: needs a CUDA GPU, and found none", file=sys.stderr)
            return 2
        about = _about(args.shape, shape, suite, settings, device)
        run = Run(args.json, about, TimeBudget(60 * args.minutes), args.skip)
        try:
            measure(run, shape, suite, settings)
        except DeviceFault as fault:
            print(f"fault of the device in: {fault}", file=sys.stderr)
            return 3
    print(as_table(run.rows))
    if suite is TINY_SUITE:
        print("\nTiny cases: these times mean nothing.")
    else:
        missed = [f"{row.name}: {', '.join(row.missed)}" for row in run.rows if row.missed]
        print("\nTargets missed:", *(missed or ["none"]), sep="\n- ")
    if run.missing:
        print("\nMissing:", *(f"{part.part}: {part.reason}" for part in run.missing), sep="\n- ")
    return 1 if any(part.reason not in (_NO_TIME, _SKIPPED) for part in run.missing) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="sizes of the model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="for everything; what does not fit is dropped"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PART", help="leave it out; repeatable"
    )
    add_flags(parser, WorkerSettings, set(_OWN))
    return parser


def _settings(given: dict[str, str], folder: Path, shape: Shape, suite: Suite) -> WorkerSettings:
    """The worker's settings, from the command line, with a pool for exactly the largest case.

    Raises:
        SettingsError: a setting is wrong.
    """
    steps = {
        "max_num_batched_tokens": str(suite.chunk_tokens),
        "max_num_sequences": str(max(suite.batches)),
    }
    settings = load(WorkerSettings, given | steps, {})
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, torch.bfloat16, device)
    host_bytes = settings.host_kv_memory_bytes
    return replace(
        settings,
        model=str(folder),
        dtype=str(dtype).removeprefix("torch."),
        num_blocks=suite.pool_blocks(settings.block_size),
        host_kv_memory_bytes=0 if host_bytes is None else host_bytes,
        max_model_len=shape.context,
    )


def _about(
    name: str, shape: Shape, suite: Suite, settings: WorkerSettings, device: torch.device
) -> dict[str, object]:
    work = LlamaWork(shape, getattr(torch, settings.dtype or "bfloat16").itemsize)
    return {
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "triton": _triton_version(),
        },
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "model": asdict(shape)
        | {
            "name": name,
            "dtype": settings.dtype,
            "weight_bytes_per_step": work.weight_bytes,
            "kv_bytes_per_token": work.kv_bytes_per_token,
        },
        "suite": asdict(suite),
        "settings": asdict(settings) | {"redis_url": None},
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


if __name__ == "__main__":
    sys.exit(main())
