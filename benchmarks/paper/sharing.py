"""Figure 15 of PagedAttention: KV blocks that the sequences of a request share."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper import plots
from benchmarks.paper.bench import Bench
from benchmarks.paper.report import Report, Row
from benchmarks.paper.simulation import OPT_13B, Job, SystemName
from benchmarks.paper.workloads import Kind, Pairs, Workload, lengths

_WIDTHS = (2, 4, 6)
_BLOCK_SIZE = 16

Column = NDArray[np.int64]

_PAPER: dict[tuple[Kind, str], tuple[tuple[float, ...], ...]] = {  # for ShareGPT, only the ends
    (Kind.ALPACA, "samples"): ((6.09,), (8.53,), (9.79,)),
    (Kind.ALPACA, "beams"): ((37.56,), (53.13,), (55.16,)),
    (Kind.SHAREGPT, "samples"): ((16.2,), (), (30.5,)),
    (Kind.SHAREGPT, "beams"): ((44.3,), (), (66.3,)),
}
_RATES = {Kind.ALPACA: 30.0, Kind.SHAREGPT: 1.5}  # of sequences; sharing depends on lengths
_SECONDS = {Kind.ALPACA: 120.0, Kind.SHAREGPT: 600.0}


def saving(bench: Bench, folder: Path) -> Report:
    """Fig. 15."""
    jobs = [_job(bench, kind, method, width) for kind, method in _PAPER for width in _WIDTHS]
    results = iter(bench.run(jobs, "Fig. 15"))
    rows, groups = [], []
    for (kind, method), papers in _PAPER.items():
        values = [100 * next(results).saved for _ in _WIDTHS]
        for width, paper, value in zip(_WIDTHS, papers, values, strict=True):
            rows.append(
                Row(f"{kind}, {width} {method}", paper, value, _remark(bench, kind, method), 1)
            )
        known = [paper[0] if paper else float("nan") for paper in papers]
        groups += [
            plots.Group(f"{kind}, {method}: paper", known),
            plots.Group(f"{kind}, {method}: here", values),
        ]
    for (kind, method), papers in _PAPER.items():
        if method == "samples":
            pairs = lengths(kind, bench.trace_dir)
            rows += [
                Row(f"{kind}, {width} samples: all lengths", paper, _percent(pairs, width), _ALL, 1)
                for width, paper in zip(_WIDTHS, papers, strict=True)
            ]
    plots.bars(folder / "fig15.png", [str(width) for width in _WIDTHS], groups, "% saved")
    return Report(
        "fig15",
        "Fig. 15: memory saved by sharing",
        f"{OPT_13B}, blocks of 16 tokens. Saved blocks in percent of those that would be needed if "
        "nothing were shared, over all steps: counts of blocks, for which the worker model hardly "
        "matters.",
        rows,
        [_SAMPLES_NOTE, _BEAMS_NOTE],
        "fig15.png",
    )


_ALL = "the sum over all requests to draw from"
_SAMPLES_NOTE = (
    "Of n samples all but one save the prompt's full blocks: (1 - 1/n) of their share. The paper's "
    "numbers imply a share of 12.2, 11.4 and 11.7 % on Alpaca, and of 32.4 and 36.6 % on ShareGPT, "
    "which are drawn apart; the traces here have 10.4 and 35.0 %."
)
_BEAMS_NOTE = (
    "Were all beams of a search to descend from one that is D tokens back, the paper's savings "
    "would imply a D of 5, 8 and 13 tokens on Alpaca and of 46 and 103 on ShareGPT, for 2, (4) and "
    "6 beams: in longer outputs, beams survive together for longer. Beams with independently drawn "
    "tokens (D of 4 to 7 at any length: 38.5, 55.8, 62.4 and 48.1, 79.2 %) do not. Here the beams "
    "of a search draw alike in 93 % of the steps, since they are nearly "
    "the same text; that share is fitted to one number, Alpaca with 6 beams, which therefore is no "
    "evidence. A real search with the demo model (`benchmarks.micro.block_sharing`) saved 41, "
    "60 and 64 %, and 48, 69 and 77 %."
)


def _percent(pairs: Pairs, width: int) -> float:
    """Percent of blocks that samples save: blocks full of prompt, in all samples but one."""
    prompts, outputs = pairs[:, 0], pairs[:, 1]
    saved = (width - 1) * (prompts // _BLOCK_SIZE) * outputs
    needed = width * (_blocks_up_to(prompts + outputs - 1) - _blocks_up_to(prompts - 1))
    return float(100 * saved.sum() / needed.sum())


def _blocks_up_to(num_tokens: Column) -> Column:
    """The sum of blocks for 1 token, for 2 tokens, and so on up to so many."""
    full, rest = np.divmod(num_tokens, _BLOCK_SIZE)
    found: Column = _BLOCK_SIZE * full * (full + 1) // 2 + rest * (full + 1)
    return found


def _job(bench: Bench, kind: Kind, method: str, width: int) -> Job:
    workload: Workload = bench.workload(kind)
    wide = workload.wide(num_samples=width) if method == "samples" else workload.wide(1, width)
    rate = _RATES[kind] / width
    return Job(OPT_13B, SystemName.PAGESTREAM, wide, rate, bench.seconds(_SECONDS[kind]))


def _remark(bench: Bench, kind: Kind, method: str) -> str:
    if method == "beams":
        if kind is Kind.SHAREGPT:
            return (
                "beams are continued at random here; those of OPT-13B survive together for longer"
            )
        return "beams are continued at random here; those of OPT-13B are unknown"
    if kind is Kind.ALPACA and bench.trace_dir:
        return (
            "only full blocks of prompts are shared, so lengths alone decide: this trace's prompts "
            "have 18.96 tokens on average, the paper's 19.31; look-alikes of 19.31 save 6.1, 9.2 "
            "and 10.2 % in sum"
        )
    return ""
