"""Draws plots of curves and bars, small enough to be kept beside the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.paper.bench import Curve
from benchmarks.paper.simulation import SystemName

_COLORS = {
    SystemName.FASTER_TRANSFORMER: "tab:green",
    SystemName.ORCA_MAX: "tab:red",
    SystemName.ORCA_POW2: "goldenrod",
    SystemName.ORCA_ORACLE: "tab:orange",
    SystemName.PAGESTREAM: "tab:blue",
}
_DPI = 80
_NUM_COLORS = 64  # in a plot's palette, which makes the file a third as large
_LARGEST_LATENCY_S = 1.0  # as in the paper's plots


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves with common axes."""

    title: str
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True)
class Group:
    """The bars of one name, one for each cluster; NaN for none."""

    name: str
    values: Sequence[float]
    color: str | None = None


def rates(path: Path, panels: Sequence[Panel], num_columns: int = 3) -> None:
    """Normalized latency against the rate of requests."""
    num_rows = -(-len(panels) // num_columns)
    figure, axes = _figure(num_rows, min(num_columns, len(panels)))
    for axis, panel in zip(axes, panels, strict=False):
        for curve in panel.curves:
            color = _COLORS[curve.system]
            axis.plot(curve.rates, curve.latencies_s, "o-", ms=3, color=color, label=curve.system)
        axis.set_title(panel.title, fontsize=9)
        axis.set_ylim(0, _LARGEST_LATENCY_S)
        axis.set_xlim(left=0)
        axis.set_xlabel("requests per second", fontsize=8)
        axis.set_ylabel("normalized latency, s/token", fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=7)
    _save(figure, path)


def lines(
    path: Path,
    names: tuple[str, str],
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    log_y: bool = False,
) -> None:
    """Named lines on one pair of axes, ``names`` of x and y; x in powers of two."""
    figure, (axis,) = _figure(1, 1)
    for name, x, y in series:
        axis.plot(x, y, "o-", ms=3, label=name)
    axis.set_xscale("log", base=2)
    if log_y:
        axis.set_yscale("log", base=2)
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlabel(names[0], fontsize=8)
    axis.set_ylabel(names[1], fontsize=8)
    axis.legend(fontsize=7)
    _save(figure, path)


def bars(path: Path, clusters: Sequence[str], groups: Sequence[Group], unit: str) -> None:
    """Clusters of bars side by side, each with its number."""
    figure, (axis,) = _figure(1, 1, wide=len(clusters) * len(groups) / 8)
    width = 0.8 / len(groups)
    for number, group in enumerate(groups):
        x = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(clusters))]
        found = axis.bar(x, group.values, width, label=group.name, color=group.color)
        axis.bar_label(found, fmt="%.3g", fontsize=6)
    _name_clusters(figure, axis, clusters, unit)
    _save(figure, path)


def stacks(path: Path, clusters: Sequence[str], groups: Sequence[Group], unit: str) -> None:
    """One bar per cluster, groups on top of each other."""
    figure, (axis,) = _figure(1, 1, wide=len(clusters) / 3)
    bottom = [0.0] * len(clusters)
    for group in groups:
        found = axis.bar(range(len(clusters)), group.values, 0.7, bottom, label=group.name)
        labels = [f"{value:.1f}" if value >= 2 else "" for value in group.values]
        axis.bar_label(found, labels, label_type="center", fontsize=7)
        bottom = [low + value for low, value in zip(bottom, group.values, strict=True)]
    _name_clusters(figure, axis, clusters, unit)
    _save(figure, path)


def _name_clusters(figure: Figure, axis: Axes, clusters: Sequence[str], unit: str) -> None:
    axis.set_xticks(range(len(clusters)), clusters, fontsize=7)
    axis.set_ylabel(unit, fontsize=8)
    figure.legend(fontsize=7, loc="outside lower center", ncols=4)


def _figure(num_rows: int, num_columns: int, wide: float = 1.0) -> tuple[Figure, list[Axes]]:
    mpl.use("agg")
    size = (4.2 * num_columns * max(1.0, wide), 3.2 * num_rows)
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    return figure, list(axes.flat)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(_NUM_COLORS)
    few.save(path, optimize=True)
