"""Reproduces the evaluation of the PagedAttention and vAttention papers with our scheduler.

    python -m benchmarks.paper [--trace-dir DIR] [--figure N|all] [--quick]

Our real scheduler core and the papers' baselines serve the papers' workloads on a virtual clock.
One page per figure compares the paper's results with these, in a table and a plot. Without
--trace-dir, lengths of prompts and outputs are look-alikes of the papers' datasets.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.paper import blocks, memory, page_groups, rates, sharing
from benchmarks.paper.bench import Bench
from benchmarks.paper.report import Report, table
from benchmarks.paper.workloads import Kind, lengths
from benchmarks.simulator.mypyc_build import prefer_compiled
from benchmarks.simulator.worker.worker_model import CALIBRATIONS, PAPER_2023
from shared.errors import PageStreamError

_FIGURES: dict[str, Callable[[Bench, Path], Report]] = {
    "2": memory.waste,
    "12": rates.basic,
    "13": memory.batched,
    "14": rates.parallel,
    "15": sharing.saving,
    "16": rates.prefix,
    "17": rates.chatbot,
    "18b": blocks.sizes,
    "19": blocks.recovery,
    "v8": page_groups.block_sizes,
    "v15": page_groups.largest_batches,
}


def main() -> None:
    """Write the pages; exits with 1 if traces cannot be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace-dir", type=Path, help="folder with the traces' lengths")
    parser.add_argument(
        "--figure",
        choices=[*_FIGURES, "all"],
        default="all",
        help="of PagedAttention; v8 and v15 are vAttention's Table 8 and Fig. 15",
    )
    parser.add_argument("--quick", action="store_true", help="short runs, to see that all works")
    parser.add_argument("--out", type=Path, default=Path("docs/paper"), help="folder for the pages")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="runs at a time, 0: in this one"
    )
    args = parser.parse_args()
    names = list(_FIGURES) if args.figure == "all" else [args.figure]
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for kind in (Kind.SHAREGPT, Kind.ALPACA):
            lengths(kind, args.trace_dir)
        with Progress(*columns, console=console) as progress:
            bench = Bench(progress, args.trace_dir, args.quick, args.processes)
            began_s = time.monotonic()
            reports = []
            for name in names:
                reports.append(_FIGURES[name](bench, args.out))
                reports[-1].write(args.out)
            seconds = time.monotonic() - began_s
    except PageStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if args.figure == "all":
        (args.out / "README.md").write_text(index(reports, bench))
    console.print(f"{len(reports)} pages in {args.out}, {seconds:.0f} s")


def index(reports: Sequence[Report], bench: Bench) -> str:
    """The page with links to all figures."""
    row_ms = 1e3 * CALIBRATIONS[PAPER_2023].row_s
    source = "with look-alikes of ShareGPT's and Alpaca's lengths"
    if bench.trace_dir:
        source = (
            "from copies of ShareGPT's and Alpaca's lengths, which are not part of this project"
        )
    rows = [
        (f"[{report.title}]({report.key}.md)", report.summary(), _worst(report))
        for report in reports
    ]
    parts = [
        "# The papers' evaluation, on a virtual clock",
        f"Written by `python -m benchmarks.paper`, {source}. Our real scheduler core (PageStream "
        "in all tables) stands where the PagedAttention paper has vLLM; Orca and FasterTransformer "
        "are small implementations of its section 6.1.",
        f"The worker model has one calibration for all figures and systems, `{PAPER_2023}`, which "
        "is also that of `benchmarks.simulator.simulate` and `benchmarks.simulator.capacity` "
        "(`docs/SIMULATOR.md`). "
        f"One of its constants is fitted, to one number: {row_ms:.2f} ms per sequence and "
        "iteration make the batch of Fig. 13b, for our scheduler on Alpaca, the paper's 132.44. "
        "Another one is how alike the beams of a search are, and is fitted to what 6 beams save "
        "on Alpaca in Fig. 15. So these two bars are no evidence; everything else follows.",
        table(("figure", "printed numbers within 10 %", "farthest"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def _worst(report: Report) -> str:
    known = [row for row in report.rows if row.ratio is not None]
    if not known:
        return "the paper has plots only"
    worst = max(known, key=lambda row: abs((row.ratio or 1.0) - 1.0))
    return f"{worst.name}: {worst.ours:.{worst.digits}f}, paper {worst.cells()[1]}"


if __name__ == "__main__":
    prefer_compiled()
    main()
