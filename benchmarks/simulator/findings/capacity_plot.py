"""Plots the capacity of a GPU."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.simulator.findings.capacity_search import Capacity, Objective
from benchmarks.simulator.findings.outcome import Outcome


def draw(found: Capacity, objective: Objective, title: str, path: Path) -> None:
    """Plot latencies by rate, and memory and queues over time at the best rate."""
    figure = Figure(figsize=(9, 10), layout="constrained")
    figure.suptitle(title)
    latencies, memory, queues = figure.subplots(3, 1)
    _draw_latencies(latencies, found, objective)
    shown = found.best or found.beyond
    if shown is not None:
        _draw_memory(memory, shown.outcome, shown.rate)
        _draw_queues(queues, shown.outcome)
    figure.savefig(path, dpi=120)


def _draw_latencies(axes: Axes, found: Capacity, objective: Objective) -> None:
    rates = [trial.rate for trial in found.trials]
    lines = (
        ("TTFT", [1_000 * trial.ttft_s for trial in found.trials], objective.ttft_s),
        ("TPOT", [1_000 * trial.tpot_s for trial in found.trials], objective.tpot_s),
    )
    for name, values, promised_s in lines:
        (line,) = axes.plot(rates, values, marker="o", label=f"{name}, p{objective.percentile:g}")
        if promised_s is not None:
            label = f"{name} promised"
            axes.axhline(1_000 * promised_s, color=line.get_color(), linestyle=":", label=label)
    if found.best is not None:
        axes.axvline(found.best.rate, color="grey", label=f"highest rate: {found.best.rate:.3g}")
    axes.set_yscale("log")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("ms")
    axes.legend()


def _draw_memory(axes: Axes, outcome: Outcome, rate: float) -> None:
    times = [moment.time_s for moment in outcome.moments]
    parts = ("token_states", "reserved", "internal", "external")
    shares = [
        [100 * getattr(moment.memory, part) / moment.memory.total for moment in outcome.moments]
        for part in parts
    ]
    axes.stackplot(times, shares, labels=[part.replace("_", " ") for part in parts])
    axes.set_ylim(0, 100)
    axes.set_xlabel(f"seconds, at {rate:.3g} requests per second")
    axes.set_ylabel("% of the KV memory")
    axes.legend(loc="lower right")


def _draw_queues(axes: Axes, outcome: Outcome) -> None:
    times = [moment.time_s for moment in outcome.moments]
    axes.plot(times, [moment.num_running for moment in outcome.moments], label="running")
    axes.plot(times, [moment.num_waiting for moment in outcome.moments], label="waiting")
    axes.set_xlabel(f"seconds; {outcome.num_preemptions:,} preemptions in all")
    axes.set_ylabel("requests")
    axes.legend()
