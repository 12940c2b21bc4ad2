"""Figures 2 and 13 of PagedAttention: the use of memory, and how many requests fit into it."""

from pathlib import Path

from benchmarks.paper import plots
from benchmarks.paper.bench import Bench
from benchmarks.paper.report import Report, Row
from benchmarks.paper.simulation import OPT_13B, ORCAS, Job, Result, SystemName
from benchmarks.paper.workloads import Kind

_SYSTEMS = (*ORCAS, SystemName.PAGESTREAM)
_SHAREGPT_S, _ALPACA_S = 3_600.0, 600.0  # duration of arrivals
_SHAREGPT_RATE, _ALPACA_RATE = 2.0, 30.0
# In percent: token states, reserved, internal and external fragmentation. Oracle's bar has two more
# parts in the text; they must be these two, because of what Oracle reserves.
_WASTE = {
    SystemName.ORCA_MAX: (20.4, 13.3, 57.3, 8.9),
    SystemName.ORCA_POW2: (26.8, 17.9, 13.6, 41.6),
    SystemName.ORCA_ORACLE: (38.2, 25.2, 0.0, 36.6),
    SystemName.PAGESTREAM: (96.3, 0.0, 0.0, 3.7),
}
_BATCHED = {
    Kind.SHAREGPT: (7.00, 9.81, 13.62, 30.42),
    Kind.ALPACA: (7.00, 43.24, 72.75, 132.44),
}
_PARTS = ("token states", "reserved", "internal fragmentation", "external fragmentation and free")


def jobs(bench: Bench, kind: Kind) -> list[Job]:
    """The runs for both figures."""
    rate, seconds = (
        (_SHAREGPT_RATE, _SHAREGPT_S) if kind is Kind.SHAREGPT else (_ALPACA_RATE, _ALPACA_S)
    )
    workload = bench.workload(kind)
    return [
        Job(OPT_13B, system, workload, rate, bench.seconds(seconds), drains=False)
        for system in _SYSTEMS
    ]


def waste(bench: Bench, folder: Path) -> Report:
    """Fig. 2."""
    results = bench.run(jobs(bench, Kind.SHAREGPT), "Fig. 2")
    found = {system: _percents(result) for system, result in zip(_SYSTEMS, results, strict=True)}
    plots.stacks(
        folder / "fig02.png",
        [name for system in _SYSTEMS for name in (f"{system}\npaper", f"{system}\nhere")],
        [
            plots.Group(part, [v for s in _SYSTEMS for v in (_WASTE[s][i], found[s][i])])
            for i, part in enumerate(_PARTS)
        ],
        "% of the KV memory",
    )
    rows = [
        Row(
            f"{system}: {part}",
            (_WASTE[system][i],) if _WASTE[system][i] else (),
            found[system][i],
            _remark(system, part),
            digits=1,
        )
        for system in _SYSTEMS
        for i, part in enumerate(_PARTS)
    ]
    settled = 100 * results[-1].settled
    name = f"{SystemName.PAGESTREAM}: token states, without the first tenth of the time"
    rows.append(Row(name, _WASTE[SystemName.PAGESTREAM][:1], settled, digits=1))
    ours = results[-1].memory
    filled = 100 * ours["token_states"] / max(1 - ours["free"] - ours["external"], 1e-9)
    note = (
        f"Of the blocks that are in use, {filled:.1f} % of the slots hold tokens: what is missing "
        "is the unfilled end of each sequence's last block. The rest of the difference is free "
        "blocks: 1 % that is kept free when a request is admitted, and blocks that are too few for "
        "the first request in the queue or a preempted one; no later request is admitted before it."
    )
    return Report(
        "fig02",
        "Fig. 2: waste of KV memory",
        f"{OPT_13B}, ShareGPT at {_SHAREGPT_RATE:g} requests/s for "
        f"{bench.seconds(_SHAREGPT_S):.0f} s, averaged over time, in percent of all slots.",
        rows,
        [note],
        "fig02.png",
    )


def batched(bench: Bench, folder: Path) -> Report:
    """Fig. 13."""
    rows, groups = [], []
    for kind, paper in _BATCHED.items():
        results = bench.run(jobs(bench, kind), f"Fig. 13, {kind}")
        for system, expected, result in zip(_SYSTEMS, paper, results, strict=True):
            remark = ""
            if kind is Kind.ALPACA and system is SystemName.PAGESTREAM:
                remark = (
                    "the number that the worker model's cost per sequence is fitted to: the memory "
                    f"is not full here ({100 * result.memory['free']:.0f} % is free), so the batch "
                    "is the rate times the time that a request takes"
                )
            rows.append(Row(f"{kind}, {system}", (expected,), result.mean_batched, remark))
        values = [result.mean_batched for result in results]
        groups += [plots.Group(f"{kind}, paper", paper), plots.Group(f"{kind}, here", values)]
    plots.bars(folder / "fig13.png", _SYSTEMS, groups, "requests in the batch")
    return Report(
        "fig13",
        "Fig. 13: average number of batched requests",
        f"{OPT_13B}, ShareGPT at {_SHAREGPT_RATE:g} requests/s for "
        f"{bench.seconds(_SHAREGPT_S):.0f} s and Alpaca at {_ALPACA_RATE:g} requests/s for "
        f"{bench.seconds(_ALPACA_S):.0f} s, averaged over time.",
        rows,
        plot="fig13.png",
    )


def _percents(result: Result) -> tuple[float, ...]:
    memory = result.memory
    parts = (
        memory["token_states"],
        memory["reserved"],
        memory["internal"],
        memory["external"] + memory["free"],
    )
    return tuple(100 * part for part in parts)


def _remark(system: SystemName, part: str) -> str:
    if system is not SystemName.PAGESTREAM:
        return ""
    if part == _PARTS[0]:
        return "the minute in which the memory fills is averaged in; see below"
    return "the unfilled slots of last blocks" if part == _PARTS[1] else ""
