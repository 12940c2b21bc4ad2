"""What a figure's page says: the paper's numbers beside ours, and why they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One number.

    Attributes:
        name: what it is.
        paper: the number that is printed, the ends of a range, or nothing if only a plot shows it.
        ours: from this run; NaN if there is none.
        remark: one sentence where they differ.
        digits: behind the decimal point.
    """

    name: str
    paper: tuple[float, ...]
    ours: float
    remark: str = ""
    digits: int = 2

    @property
    def ratio(self) -> float | None:
        """Ours in the paper's; against a range, 1 inside of it and to its nearer end outside."""
        if not self.paper:
            return None
        nearest = min(max(self.ours, min(self.paper)), max(self.paper))
        return self.ours / nearest if nearest else None

    def cells(self) -> tuple[str, ...]:
        """As a table shows it."""
        paper = " – ".join(f"{each:.{self.digits}f}" for each in self.paper) or "plot only"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return self.name, paper, f"{self.ours:.{self.digits}f}", ratio, self.remark


@dataclass(frozen=True, slots=True)
class Report:
    """A figure.

    Attributes:
        key: how it is asked for, and its files' name.
        title: what it shows.
        setup: what was run, in sentences.
        rows: the numbers.
        notes: paragraphs below the table.
        plot: name of the picture beside the page.
    """

    key: str
    title: str
    setup: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    plot: str = ""

    def markdown(self) -> str:
        """The page."""
        parts = [f"# {self.title}", self.setup]
        if self.plot:
            parts.append(f"![{self.title}]({self.plot})")
        parts.append(table(("", "paper", "here", "ratio", ""), [row.cells() for row in self.rows]))
        parts.extend(self.notes)
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> None:
        """Into ``<key>.md``."""
        (folder / f"{self.key}.md").write_text(self.markdown())

    def summary(self) -> str:
        """How many numbers are how close."""
        ratios = [row.ratio for row in self.rows if row.ratio is not None]
        close = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
        return f"{close} of {len(ratios)}" if ratios else "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, numbers to the right."""
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 2) + ["---"])]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
