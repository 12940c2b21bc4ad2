"""The page of a figure: the paper's numbers beside ours, and the reasons for differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One number.

    Attributes:
        name: of the number.
        paper: the printed number, the ends of a range, or empty if only a plot shows it.
        ours: from this run; NaN if there is none.
        remark: one sentence on a difference.
        digits: after the decimal point.
    """

    name: str
    paper: tuple[float, ...]
    ours: float
    remark: str = ""
    digits: int = 2

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; for a range, 1 inside it, else relative to its nearer end."""
        if not self.paper:
            return None
        nearest = min(max(self.ours, min(self.paper)), max(self.paper))
        return self.ours / nearest if nearest else None

    def cells(self) -> tuple[str, ...]:
        """The cells of a table's row."""
        paper = " – ".join(f"{each:.{self.digits}f}" for each in self.paper) or "plot only"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return self.name, paper, f"{self.ours:.{self.digits}f}", ratio, self.remark


@dataclass(frozen=True, slots=True)
class Report:
    """The page of one figure.

    Attributes:
        key: option value and file name of the figure.
        title: of the page.
        setup: sentences on what was run.
        rows: of the table.
        notes: paragraphs below the table.
        plot: file name of the plot.
    """

    key: str
    title: str
    setup: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    plot: str = ""

    def markdown(self) -> str:
        """The page in Markdown."""
        parts = [f"# {self.title}", self.setup]
        if self.plot:
            parts.append(f"![{self.title}]({self.plot})")
        parts.append(table(("", "paper", "here", "ratio", ""), [row.cells() for row in self.rows]))
        parts.extend(self.notes)
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> None:
        """Write the page to ``<key>.md``."""
        (folder / f"{self.key}.md").write_text(self.markdown())

    def summary(self) -> str:
        """How many numbers are how close to the paper's."""
        ratios = [row.ratio for row in self.rows if row.ratio is not None]
        close = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
        return f"{close} of {len(ratios)}" if ratios else "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with numbers aligned to the right."""
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 2) + ["---"])]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
