"""The results of the kernel benchmark: times, ratios and targets, as table and JSON."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.report_tables import Absent, missed, number, table


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median, minimum and maximum of several measurements."""

    median_us: float
    low_us: float
    high_us: float

    @staticmethod
    def of(samples_us: Sequence[float]) -> "Timing":
        """Summarize measurements.

        Raises:
            ValueError: if there are none.
        """
        if not samples_us:
            raise ValueError("no measurements")
        return Timing(statistics.median(samples_us), min(samples_us), max(samples_us))


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another way to the same result, measured in the same run.

    ``error`` is the largest difference from the exact result, relative to its largest element; None
    where equality was checked bit by bit. A baseline that did not run, or whose output is wrong,
    has no timing but a reason.
    """

    name: str
    timing: Timing | None
    error: float | None = None
    reason: str | None = None
    wanted_ratio: float | None = None  # its time over ours

    def ratio(self, ours: Timing) -> float | None:
        """Its time over ours."""
        return None if self.timing is None else self.timing.median_us / ours.median_us


@dataclass(frozen=True, slots=True)
class Row:
    """One case.

    Attributes:
        work: bytes or floating-point operations.
        ceiling: rate per second that counts as 1.
        wanted_share: target, as a share of the ceiling.
    """

    case: str
    ours: Timing
    work: int
    unit: str
    ceiling: float | None = None
    wanted_share: float | None = None
    error: float | None = None
    baselines: tuple[Baseline, ...] = ()

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / (self.ours.median_us * 1e-6)

    @property
    def share(self) -> float | None:
        """The rate as a share of the ceiling."""
        return None if self.ceiling is None else self.rate / self.ceiling

    @property
    def missed(self) -> tuple[str, ...]:
        """The targets that were missed, with the figures."""
        ratios = ((each.name, each.ratio(self.ours), each.wanted_ratio) for each in self.baselines)
        return missed([("share", self.share, self.wanted_share), *ratios])


def as_table(rows: Sequence[Row]) -> str:
    """Markdown, one line per row and baseline."""
    head = ["case", "µs (fastest–slowest)", "rate", "share (target)"]
    return table([*head, "against", "its µs", "ratio (target)"], map(_cells, rows))


def as_json(
    rows: Sequence[Row], machine: dict[str, object], absent: Sequence[Absent] = ()
) -> dict[str, object]:
    """All measurements and absent parts, as plain data."""
    found = []
    for row in rows:
        entry = dataclasses.asdict(row)
        entry |= {"rate": row.rate, "share": row.share, "missed": row.missed}
        for plain, baseline in zip(entry["baselines"], row.baselines, strict=True):
            plain["ratio"] = baseline.ratio(row.ours)
        found.append(entry)
    missing = [dataclasses.asdict(part) for part in absent]
    return {"machine": machine, "rows": found, "absent": missing}


def _cells(row: Row) -> tuple[list[str], list[list[str]]]:
    ours = row.ours
    own = [
        row.case,
        f"{ours.median_us:.1f} ({ours.low_us:.1f}–{ours.high_us:.1f})",
        f"{row.rate / 1e12:.2f} {'TB/s' if row.unit == 'bytes' else 'TFLOP/s'}",
        number(row.share, row.wanted_share),
    ]
    against = []
    for each in row.baselines:
        if each.timing is None:
            cells = [f"none: {each.reason}", ""]
        else:
            ratio = number(each.ratio(ours), each.wanted_ratio)
            cells = [f"{each.timing.median_us:.1f}", ratio]
        against.append([each.name, *cells])
    return own, against
