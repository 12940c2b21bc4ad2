"""The common options of the simulator's commands, and their progress bar."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.baselines.faster_transformer import FasterTransformer
from benchmarks.baselines.orca import Orca, Reservation
from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.system import System
from benchmarks.simulator.worker.hardware import GPUS, find_gpu
from benchmarks.simulator.worker.model_shapes import MODELS, find_model
from benchmarks.simulator.worker.worker_model import (
    CALIBRATIONS,
    PAPER_2023,
    WorkerModel,
    find_calibration,
)
from benchmarks.simulator.workloads import LOOK_ALIKES, Workload
from scheduler_svc.core.config import Preemption
from shared.errors import SettingsError

PAGESTREAM = "pagestream"
_FASTER_TRANSFORMER = "faster-transformer"
_ORCA = "orca-"
SYSTEMS = (PAGESTREAM, *(f"{_ORCA}{kind}" for kind in Reservation), _FASTER_TRANSFORMER)


@dataclass(frozen=True, slots=True)
class Bench:
    """All options of a simulation except the requests' rate.

    Attributes:
        worker: model and GPUs.
        config: of our scheduler.
        system: one of ``SYSTEMS``.
        seed: of all random numbers.
    """

    worker: WorkerModel
    config: PageStreamConfig
    system: str
    seed: int

    def new_system(self) -> System:
        """A new engine.

        Raises:
            SettingsError: this system cannot serve this model.
        """
        worker, limit = self.worker, self.max_model_len
        try:
            if self.system == PAGESTREAM:
                return PageStream(worker, self.config, self.seed)
            if self.system == _FASTER_TRANSFORMER:
                return FasterTransformer(worker.kv_slots, limit)
            reservation = Reservation(self.system.removeprefix(_ORCA))
            return Orca(worker.kv_slots, reservation, limit, self.config.max_num_sequences)
        except ValueError as error:
            raise SettingsError("--system", self.system, str(error)) from None

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        limit = self.config.max_model_len or self.worker.model.max_model_len
        return min(limit, self.worker.model.max_model_len)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for trace, model, hardware and scheduler."""
    names = ", ".join(LOOK_ALIKES)
    models, gpus = (", ".join(found.name for found in known) for known in (MODELS, GPUS))
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE", help=f"a trace's file, or one of {names}")
    add("--model", default="OPT-13B", help=f"one of {models}")
    add("--gpu", default="A100-40G", help=f"one of {gpus}")
    add("--tp", type=whole, default=1, metavar="N", help="GPUs that share the model")
    add("--system", choices=SYSTEMS, default=PAGESTREAM, help="the simulated server")
    add("--seed", type=int, default=0, help="of all random numbers")
    add("--block-size", type=whole, default=16, metavar="TOKENS")
    add("--max-num-sequences", type=whole, default=256, metavar="N")
    add("--max-num-batched-tokens", type=whole, default=2_048, metavar="TOKENS")
    add("--max-model-len", type=whole, metavar="TOKENS", help="longer requests are left out")
    add("--max-plans-in-flight", type=whole, default=2, metavar="N")
    add("--preemption", choices=[*Preemption], default=Preemption.AUTO)
    add(
        "--no-prefix-caching",
        action="store_true",
        help="free blocks as soon as they are unreferenced",
    )
    add(
        "--calibration",
        choices=CALIBRATIONS,
        default=PAPER_2023,
        help="costs that are in no data sheet (default: fitted to the PagedAttention paper)",
    )
    add(
        "--pass-ms",
        type=positive,
        help="of a pass of the model; by default the calibration's",
    )
    add(
        "--row-ms",
        type=positive,
        help="of a row that samples; by default the calibration's",
    )
    add("--json", action="store_true", help="print one JSON object")


def bench_of(args: argparse.Namespace) -> Bench:
    """The options that ``add_options`` defines.

    Raises:
        SettingsError: names the option and its value.
    """
    model, gpu = find_model(args.model), find_gpu(args.gpu)
    try:
        worker = WorkerModel(model, gpu, args.tp, find_calibration(args.calibration))
    except ValueError as error:
        raise SettingsError("--tp", args.tp, str(error)) from None
    costs_ms = {"pass_s": args.pass_ms, "row_s": args.row_ms}
    worker = worker.with_calibration(
        **{name: cost_ms / 1_000 for name, cost_ms in costs_ms.items() if cost_ms is not None}
    )
    config = PageStreamConfig(
        block_size=args.block_size,
        max_num_sequences=args.max_num_sequences,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_plans_in_flight=args.max_plans_in_flight,
        prefix_caching=not args.no_prefix_caching,
        preemption=args.preemption,
        max_model_len=args.max_model_len,
    )
    try:
        config.for_core(worker)
    except ValueError as error:
        raise SettingsError("--model", args.model, str(error)) from None
    return Bench(worker, config, args.system, args.seed)


def workload_of(args: argparse.Namespace, bench: Bench) -> Workload:
    """The workload of the trace option.

    Raises:
        SettingsError: there is no such trace.
        TraceError: it cannot be read.
    """
    return Workload(args.trace, bench.max_model_len)


def whole(text: str) -> int:
    """A number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


@contextmanager
def shown_progress(title: str, total_s: float) -> Iterator[Callable[[float, int], None]]:
    """Show a progress bar over virtual time; the yielded function moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} virtual s, {task.fields[served]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal  # its thread would take time anyway
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(title, total=total_s, served="")

        def show(now_s: float, num_complete: int) -> None:
            served = f"{num_complete:,} requests served"
            progress.update(task, completed=min(now_s, total_s), served=served)

        yield show
