"""Figures 12, 14, 16 and 17 of PagedAttention: the rates of requests that systems sustain."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.paper import plots
from benchmarks.paper.bench import SUSTAINED_S, Bench, Curve
from benchmarks.paper.report import Report, Row
from benchmarks.paper.simulation import (
    LLAMA_13B,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    ORCAS,
    Job,
    Setup,
    SystemName,
)
from benchmarks.paper.workloads import Kind, Workload

_S = SystemName
_ALL = tuple(SystemName)
_WIDTHS = (2, 4, 6)
_PREFIXES = {80: 1.67, 341: 3.58}  # tokens of the shared prefix: the paper's ratio
_OTHER_LIMITS_S = (0.2, 1.0)  # further limits at which ratios are shown
_HOW = (
    "A rate counts as sustained while the mean normalized latency is at most "
    f"{SUSTAINED_S} s/token, half of the axis of the paper's plots; it is read off between the "
    "runs. A run ends when all of its requests are served."
)


@dataclass(frozen=True, slots=True)
class _Case:
    """A panel: systems, and a rate that none of them can serve."""

    title: str
    setup: Setup
    workload: Workload
    systems: Sequence[SystemName]
    overload: float
    duration_s: float

    def jobs(self, bench: Bench) -> list[Job]:
        seconds = bench.seconds(self.duration_s)
        return [
            Job(self.setup, system, self.workload, self.overload, seconds)
            for system in self.systems
        ]


def basic(bench: Bench, folder: Path) -> Report:
    """Fig. 12."""
    sharegpt, alpaca = bench.workload(Kind.SHAREGPT), bench.workload(Kind.ALPACA)
    cases = [
        _Case("OPT-13B, ShareGPT", OPT_13B, sharegpt, _ALL, 4.0, 400.0),
        _Case("OPT-66B, ShareGPT", OPT_66B, sharegpt, _ALL, 2.5, 400.0),
        _Case("OPT-175B, ShareGPT", OPT_175B, sharegpt, _ALL, 6.0, 300.0),
        _Case("OPT-13B, Alpaca", OPT_13B, alpaca, _ALL, 50.0, 80.0),
        _Case("OPT-66B, Alpaca", OPT_66B, alpaca, _ALL, 50.0, 80.0),
        _Case("OPT-175B, Alpaca", OPT_175B, alpaca, _ALL, 50.0, 80.0),
    ]
    found = _run(bench, cases, "Fig. 12", folder / "fig12.png")
    ranges = {
        _S.ORCA_ORACLE: ((1.7, 2.7), ()),
        _S.ORCA_POW2: ((), ()),
        _S.ORCA_MAX: ((2.7, 8.0), ()),
        _S.FASTER_TRANSFORMER: ((), ()),
    }
    rows = []
    for case in cases:
        curves = found[case.title]
        rows.append(_rate_row(case, curves))
        for system, (on_sharegpt, on_alpaca) in ranges.items():
            paper = on_sharegpt if case.workload is sharegpt else on_alpaca
            rows.append(_ratio_row(case, curves, system, paper))
    largest = max(
        _ratio(found[case.title], _S.FASTER_TRANSFORMER)
        for case in cases
        if case.workload is sharegpt
    )
    rows.append(Row(f"ShareGPT: x {_S.FASTER_TRANSFORMER}, largest of the three", (22.0,), largest))
    return Report(
        "fig12",
        "Fig. 12: latency against the rate of requests",
        f"{_HOW} Requests arrive for {_times(bench, cases)} s; the paper's traces are an hour "
        "long, 15 minutes for OPT-175B.",
        rows,
        [
            "The paper prints ranges over its three models for ShareGPT, and for FasterTransformer "
            "how large the ratio is at most; of Alpaca it has plots. With OPT-175B the memory "
            "holds more than 100 requests, so the cost of each in an iteration, fitted to OPT-13B, "
            "counts more than the memory that is saved. FasterTransformer's latency rises from its "
            "lowest rates on (short answers wait for the longest of their batch), so its ratio "
            "depends on the limit that is chosen."
        ],
        "fig12.png",
    )


def parallel(bench: Bench, folder: Path) -> Report:
    """Fig. 14."""
    alpaca = bench.workload(Kind.ALPACA)
    systems = (*ORCAS, _S.PAGESTREAM)
    basic_case = _Case("basic", OPT_13B, alpaca, systems, 50.0, 40.0)
    cases = [
        _Case(
            f"{width} samples",
            OPT_13B,
            alpaca.wide(num_samples=width),
            systems,
            50.0 / width,
            40.0,
        )
        for width in _WIDTHS
    ] + [
        _Case(f"{width} beams", OPT_13B, alpaca.wide(beam_width=width), systems, 40.0 / width, 40.0)
        for width in _WIDTHS
    ]
    found = _run(bench, [basic_case, *cases], "Fig. 14", folder / "fig14.png", skip=1)
    paper = {"basic": (1.3,), "6 beams": (2.3,)}
    rows = []
    for case in (basic_case, *cases):
        rows.append(_rate_row(case, found[case.title]))
        rows.append(_ratio_row(case, found[case.title], _S.ORCA_ORACLE, paper.get(case.title, ())))
        if case.title in paper:
            rows += _reasons(bench, case, _S.ORCA_ORACLE)
    return Report(
        "fig14",
        "Fig. 14: parallel sampling and beam search",
        f"{OPT_13B}, Alpaca. {_HOW} Requests arrive for {_times(bench, cases)} s.",
        rows,
        [
            "Beams are continued by random probabilities of tokens. Orca copies a beam's keys and "
            "values whenever a second beam continues it, at the memory's bandwidth, and computes "
            "the prompt for every sequence.",
            "Six beams run into the limit of 256 sequences, with half of the memory free, and each "
            "of them costs as much per iteration as a request of Fig. 13b, the bar that this cost "
            "is fitted to; the paper's system may spend less on beams that share a request.",
        ],
        "fig14.png",
    )


def prefix(bench: Bench, folder: Path) -> Report:
    """Fig. 16."""
    systems = (_S.ORCA_ORACLE, _S.PAGESTREAM)
    cases = {
        length: _Case(
            f"{length} tokens in common",
            LLAMA_13B,
            bench.workload(Kind.TRANSLATION, shared_prefix=length),
            systems,
            100.0,
            60.0,
        )
        for length in _PREFIXES
    }
    found = _run(bench, list(cases.values()), "Fig. 16", folder / "fig16.png")
    rows = []
    for length, case in cases.items():
        rows.append(_rate_row(case, found[case.title]))
        rows.append(_ratio_row(case, found[case.title], _S.ORCA_ORACLE, (_PREFIXES[length],)))
        rows += _reasons(bench, case, _S.ORCA_ORACLE)
    return Report(
        "fig16",
        "Fig. 16: prompts that begin alike",
        f"{LLAMA_13B}. {_HOW} Sentences have 27 tokens and translations 38 on average, together "
        "65: four more examples make the paper's prefix 261 tokens longer. The lengths of WMT16 "
        f"themselves are not at hand. Requests arrive for {_times(bench, cases.values())} s.",
        rows,
        [
            "With 341 tokens in common the batch is held up by the limit of 256 sequences, not by "
            "the memory, and its iterations are long: each sequence costs 0.27 ms, and reads the "
            "shared keys and values for itself."
        ],
        "fig16.png",
    )


def chatbot(bench: Bench, folder: Path) -> Report:
    """Fig. 17."""
    case = _Case(
        "conversations", OPT_13B, bench.workload(Kind.CHAT), (*ORCAS, _S.PAGESTREAM), 3.0, 400.0
    )
    found = _run(bench, [case], "Fig. 17", folder / "fig17.png")[case.title]
    rows = [_rate_row(case, found)]
    rows += [_ratio_row(case, found, system, (2.0,)) for system in ORCAS]
    rows += _reasons(bench, case, _S.ORCA_MAX)
    return Report(
        "fig17",
        "Fig. 17: chatbot",
        f"{OPT_13B}. {_HOW} Prompts are the last 1,024 tokens of conversations put together from "
        "rounds with ShareGPT's lengths, where one request in ten begins a new one. Requests "
        f"arrive for {_times(bench, [case])} s.",
        rows,
        [
            "The memory has room for 15,700 tokens: for 7 runs of 2,048, or for 13 requests as "
            "long as they are on average, or for 15 if none had generated anything. So 2 x would "
            "need iterations that take no longer with twice the requests. Here they do: more keys "
            "and values are read, more rows are sampled, and more prompts of 1,024 tokens are "
            "computed in each. The paper prints no batch for this figure, so it is unknown which "
            "of these costs its system less."
        ],
        "fig17.png",
    )


def _reasons(bench: Bench, case: _Case, system: SystemName) -> list[Row]:
    """The causes of a ratio: how both systems compute under more requests than they can serve."""
    jobs = [replace(job, drains=False) for job in case.jobs(bench)]
    ran = {job.system: job for job in jobs}
    ours, theirs = bench.run([ran[_S.PAGESTREAM], ran[system]], f"{case.title}: why")
    batched = ours.mean_batched / theirs.mean_batched
    longer = ours.iteration_s / theirs.iteration_s
    return [
        Row(
            f"{case.title}: requests in the batch, x {system}",
            (),
            batched,
            f"{ours.mean_batched:.1f} and {theirs.mean_batched:.1f}",
        ),
        Row(
            f"{case.title}: time of an iteration, x {system}",
            (),
            longer,
            f"{1e3 * ours.iteration_s:.0f} and {1e3 * theirs.iteration_s:.0f} ms",
        ),
    ]


def _run(
    bench: Bench, cases: Sequence[_Case], title: str, path: Path, skip: int = 0
) -> Mapping[str, Sequence[Curve]]:
    """All curves by title; those after the first ``skip`` are plotted."""
    jobs = [(case, job) for case in cases for job in case.jobs(bench)]
    curves = iter(bench.curves([job for _, job in jobs], title))
    found: dict[str, list[Curve]] = {}
    for case, _ in jobs:
        found.setdefault(case.title, []).append(next(curves))
    panels = [plots.Panel(case.title, found[case.title]) for case in cases[skip:]]
    plots.rates(path, panels, num_columns=min(3, len(panels)))
    return found


def _curve(curves: Sequence[Curve], system: SystemName) -> Curve:
    return next(curve for curve in curves if curve.system is system)


def _rate_row(case: _Case, curves: Sequence[Curve]) -> Row:
    rate = _curve(curves, _S.PAGESTREAM).sustained()
    return Row(f"{case.title}: {_S.PAGESTREAM}, requests/s", (), rate)


def _ratio_row(
    case: _Case, curves: Sequence[Curve], system: SystemName, paper: tuple[float, ...]
) -> Row:
    low, high = _OTHER_LIMITS_S
    remark = (
        f"at {low} s/token {_ratio(curves, system, low):.2f}, "
        f"at {high:g} s/token {_ratio(curves, system, high):.2f}"
    )
    lost = [
        each for each in (_S.PAGESTREAM, system) if not _curve(curves, each).passes(SUSTAINED_S)
    ]
    if lost:
        remark = f"no run of {' and '.join(lost)} crossed the limit; {remark}"
    return Row(f"{case.title}: x {system}", paper, _ratio(curves, system), remark)


def _ratio(curves: Sequence[Curve], system: SystemName, limit_s: float = SUSTAINED_S) -> float:
    """Our sustained rate over another system's."""
    ours, theirs = _curve(curves, _S.PAGESTREAM), _curve(curves, system)
    return ours.sustained(limit_s) / theirs.sustained(limit_s)


def _times(bench: Bench, cases: Iterable[_Case]) -> str:
    found = sorted({bench.seconds(case.duration_s) for case in cases})
    return " to ".join(f"{each:.0f}" for each in dict.fromkeys((found[0], found[-1])))
