"""Times the Triton kernels on a GPU against other ways to the same results.

    python -m benchmarks.gpu.kernels [--json FILE] [--minutes 9] [--smoke]

Every baseline's output is compared with the exact result before its time counts. Parts that no
longer fit into the time are listed, and so are failed ones with their errors; the others are still
measured. The file is written again after every part. ``--smoke`` runs tiny cases, without a GPU in
Triton's interpreter, as a test; its times are meaningless.

Exit codes: 0, whether or not targets are reached; 1 if a part failed; 2 without a GPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.device_memory import free_unused
from benchmarks.gpu.kernels.baselines import ATTENTION
from benchmarks.gpu.kernels.cases import LAYOUTS, AttentionCase, Suite, full_suite, smoke_suite
from benchmarks.gpu.kernels.clock import Clock
from benchmarks.gpu.kernels.layers import measure_layers
from benchmarks.gpu.kernels.moves import (
    measure_bandwidth,
    measure_copies,
    measure_swaps,
    measure_write,
)
from benchmarks.gpu.kernels.pools import Step, make_step
from benchmarks.gpu.kernels.report import Baseline, Row, as_json, as_table
from benchmarks.gpu.report_tables import Absent, write_json
from kernels.interface import AttentionBackend
from kernels.reference import ReferenceBackend

_NO_TIME = "no time was left"
# Relative to the largest element: rounding of 16-bit inputs and weights.
_LARGEST_ERROR = 0.02


def main() -> int:
    """Measure, print a table, and write JSON if wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no part begins")
    parser.add_argument("--smoke", action="store_true", help="tiny cases, on any machine")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        if not args.smoke:
            print("benchmarks.gpu.kernels: needs a CUDA GPU, and found none", file=sys.stderr)
            return 2
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    absent: list[Absent] = []
    machine = _machine(device) | {"smoke": args.smoke}
    suite = smoke_suite() if args.smoke else full_suite()
    for item in measure(suite, device, 60 * args.minutes):
        if isinstance(item, Absent):
            absent.append(item)
            print(f"{item.part}: {item.reason}", file=sys.stderr, flush=True)
        else:
            rows.append(item)
            print(f"{item.case}: {item.ours.median_us:.1f} µs", file=sys.stderr, flush=True)
        if args.json is not None:
            write_json(args.json, as_json(rows, machine, absent))
    print(as_table(rows))
    if args.smoke:
        print("\nTiny cases: these times mean nothing.")
    else:
        missed = [f"{row.case}: {', '.join(row.missed)}" for row in rows if row.missed]
        print("\nTargets missed:", *(missed or ["none"]), sep="\n- ")
    if absent:
        print("\nAbsent:", *(f"{part.part}: {part.reason}" for part in absent), sep="\n- ")
    return 1 if any(part.reason != _NO_TIME for part in absent) else 0


def measure(suite: Suite, device: torch.device, most_s: float) -> Iterator[Row | Absent]:
    """A row for each case, or why there is none; no case begins after ``most_s`` seconds."""
    # These import Triton, which decides at import whether it interprets.
    from benchmarks.gpu.kernels.mapped_attention import measure_mapped
    from kernels.triton.backend import TritonBackend
    from kernels.triton.block_mover import TritonMover

    began = time.monotonic()
    torch.manual_seed(0)
    clock = Clock(device)
    backend = TritonBackend()
    copied, read = measure_bandwidth(clock, device, suite.bandwidth_bytes)
    yield copied
    yield read
    ceiling = copied.rate
    pool = suite.pool
    parts: list[tuple[str, Callable[[], Iterable[Row]]]] = []
    for case in suite.attention:
        parts.append((case.name, partial(measure_attention, clock, backend, case, device, ceiling)))
    for count in suite.written_tokens:
        written = partial(measure_write, clock, backend, pool, count, device, ceiling)
        parts.append((f"write {count} tokens", written))
    moved = suite.moved_blocks
    for layout in LAYOUTS:
        copies = partial(measure_copies, clock, TritonMover, pool, moved, device, ceiling, layout)
        swaps = partial(measure_swaps, clock, TritonMover, pool, moved, device, layout)
        parts += [(f"copies, {layout}", copies), (f"swaps, {layout}", swaps)]
    for rows in suite.layer_rows:
        layers = partial(measure_layers, clock, suite.layers, rows, device, ceiling)
        parts.append((f"layers of {rows} rows", layers))
    mapped = partial(measure_mapped, clock, backend, suite.mapped, device, ceiling)
    parts.append(("mapped blocks", mapped))
    for name, run in parts:
        if time.monotonic() - began > most_s:
            yield Absent(name, _NO_TIME)
            continue
        try:
            yield from run()
        except Exception as problem:  # one failure must not prevent the other parts
            yield Absent(name, _reason(problem))
        free_unused()


def measure_attention(
    clock: Clock,
    backend: AttentionBackend,
    case: AttentionCase,
    device: torch.device,
    ceiling: float,
) -> Iterator[Row]:
    """Measure one case and its baselines, all compared with the reference.

    Raises:
        RuntimeError: our own output is wrong.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    step = make_step(case, dtype, device)
    exact = torch.zeros_like(step.out)
    ReferenceBackend().attend(step.query, step.cache, step.batch, step.params, exact)

    def attend() -> None:
        backend.attend(step.query, step.cache, step.batch, step.params, step.out)

    timing = clock.time([attend])
    error = _error(step.out, exact)
    if not error <= _LARGEST_ERROR:
        raise RuntimeError(f"{case.name}: our output is wrong by {error:.1e}")
    baselines = [
        _measure_baseline(clock, backend, step, exact, name, wanted)
        for name, wanted in case.baselines.items()
    ]
    name = f"{case.name}, block {case.block_size}"
    if case.layout != "layer_major":
        name += f", {case.layout}"
    if case.counts_operations:
        work, unit, rate = case.operations(), "operations", None
    else:
        work, unit, rate = case.bytes_moved(step.cache.key.element_size()), "bytes", ceiling
    yield Row(name, timing, work, unit, rate, case.wanted_share, error, tuple(baselines))


def _measure_baseline(
    clock: Clock,
    backend: AttentionBackend,
    step: Step,
    exact: torch.Tensor,  # [T, H, D]
    name: str,
    wanted: float | None,
) -> Baseline:
    """Measure a baseline; one that fails is reported and does not prevent the other rows."""
    try:
        call = ATTENTION[name](step, backend)
        error = _error(call(), exact)
        if not error <= _LARGEST_ERROR:
            return Baseline(name, None, error, f"its output is wrong by {error:.1e}", wanted)
        return Baseline(name, clock.time([call]), error, None, wanted)
    except Exception as problem:
        return Baseline(name, None, None, _reason(problem), wanted)


def _reason(problem: Exception) -> str:
    """The error in one short line."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:160]


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the largest element; NaN if anything is."""
    difference = (found.float() - exact.float()).abs().max()
    return float(difference / exact.float().abs().max())


def _machine(device: torch.device) -> dict[str, object]:
    import triton

    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}


if __name__ == "__main__":
    sys.exit(main())
