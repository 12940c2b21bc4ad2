"""The results of the worker benchmark, as a table and as JSON."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.device_limits import Ceilings
from benchmarks.gpu.report_tables import Absent, missed, number, table


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of several runs."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(found: Sequence[float]) -> "Spread":
        """Summarize measurements.

        Raises:
            ValueError: there are none.
        """
        if not found:
            raise ValueError("no measurements")
        return Spread(statistics.median(found), min(found), max(found))


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """Another way to the same tokens, measured in the same run.

    Attributes:
        how: choices that it made itself.
        ms: of the steps that the row counts.
        whole_ms: from the prompts to the last token.
        tokens_per_s: generated or prompt tokens, by ``ms``.
        ratio: its ``ms`` over ours.
        whole_ratio: its ``whole_ms`` over ours.
        wanted_ratio: target; None: it is only shown.
        same_first_tokens: share of sequences whose first token equals ours.
        same_tokens: share of all tokens that equal ours.
    """

    name: str
    how: str
    ms: Spread
    whole_ms: Spread
    tokens_per_s: float
    ratio: float
    whole_ratio: float
    wanted_ratio: float | None
    same_first_tokens: float
    same_tokens: float


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One case of our worker.

    Attributes:
        case: ``decode`` or ``prefill``.
        batch: sequences.
        prompt_tokens: of each.
        ms: of a step that only decodes, or of the steps that compute one prompt.
        whole_ms: from the prompts to the last token.
        tokens_per_s: generated or prompt tokens.
        model_ms: forward pass within ``ms``, as the worker measures it.
        planning_ms: of a step in the scheduler core, which is another process in a real engine.
        limit_ms: lower bound by the device's rates.
        limited_by: ``bandwidth`` or ``compute``.
        share_of_limit: ``limit_ms`` over ``ms``.
        wanted_share: target; None: it is only shown.
    """

    case: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    mean_context: float
    runs: int
    steps: int
    ms: Spread
    whole_ms: Spread
    tokens_per_s: float
    model_ms: float
    planning_ms: float
    limit_ms: float
    limited_by: str
    share_of_limit: float
    wanted_share: float | None
    baselines: tuple[BaselineRow, ...] = ()

    @property
    def name(self) -> str:
        """Name of the case for tables."""
        tokens = f"{self.prompt_tokens} tokens"
        return f"decode, {self.batch} × {tokens}" if self.case == "decode" else f"prefill, {tokens}"

    @property
    def missed(self) -> tuple[str, ...]:
        """The targets that were missed, with the figures."""
        ratios = ((each.name, each.ratio, each.wanted_ratio) for each in self.baselines)
        return missed([("share of limit", self.share_of_limit, self.wanted_share), *ratios])


def as_table(rows: Sequence[WorkerRow]) -> str:
    """Markdown, one line per row and baseline."""
    head = ["case", "ms (lowest–highest)", "tokens/s", "limit, ms", "share (target)"]
    head += ["against", "its ms", "ratio (target)", "whole run", "same tokens"]
    return table(head, map(_cells, rows))


def as_json(
    rows: Sequence[WorkerRow],
    about: dict[str, object],
    ceilings: Ceilings | None,
    missing: Sequence[Absent],
) -> dict[str, object]:
    """All measurements and missing parts, as plain data."""
    return {
        **about,
        "ceilings": None if ceilings is None else dataclasses.asdict(ceilings),
        "rows": [dataclasses.asdict(row) | {"missed": row.missed} for row in rows],
        "missing": [dataclasses.asdict(part) for part in missing],
    }


def _cells(row: WorkerRow) -> tuple[list[str], list[list[str]]]:
    own = [
        row.name,
        _spread(row.ms),
        f"{row.tokens_per_s:.0f}",
        f"{row.limit_ms:.3f} ({row.limited_by})",
        number(row.share_of_limit, row.wanted_share),
    ]
    against = [
        [
            f"{each.name} ({each.how})".replace("|", "\\|"),
            _spread(each.ms),
            number(each.ratio, each.wanted_ratio),
            f"{each.whole_ratio:.2f}",
            f"{each.same_tokens:.2f}",
        ]
        for each in row.baselines
    ]
    return own, against


def _spread(found: Spread) -> str:
    return f"{found.median:.3f} ({found.low:.3f}–{found.high:.3f})"
