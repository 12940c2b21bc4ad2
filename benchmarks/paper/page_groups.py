"""vAttention's Table 8 and Figure 15: tokens in a page group, and the largest batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.baselines.vattention import PageGroups, VAttention
from benchmarks.paper import plots
from benchmarks.paper.bench import Bench
from benchmarks.paper.report import Report, Row
from benchmarks.paper.simulation import Setup
from benchmarks.paper.workloads import Kind
from benchmarks.simulator.virtual_clock import run
from benchmarks.simulator.worker.model_shapes import find_model

_KIB = 1 << 10
_GROUPS_KIB = (64, 128, 256, 2_048)
_TABLE_8 = {  # model and degree of tensor parallelism: tokens in a page group
    ("Yi-6B", 1): (64, 128, 256, 2_048),
    ("Yi-6B", 2): (128, 256, 512, 4_096),
    ("Llama-3-8B", 1): (32, 64, 128, 1_024),
    ("Llama-3-8B", 2): (64, 128, 256, 2_048),
    ("Yi-34B", 1): (32, 64, 128, 1_024),
    ("Yi-34B", 2): (64, 128, 256, 2_048),
}
_RATE, _SECONDS = 7.0, 240.0
_EACH_S = 1.0  # sampling interval of the batch


@dataclass(frozen=True, slots=True)
class _Printed:
    """Results of Fig. 15, of which only the ends are printed."""

    setup: Setup
    smallest_groups: int  # largest batch with 64 KiB
    largest_groups: int  # with 2 MiB


_FIG_15 = (
    _Printed(Setup("Yi-6B", "A100-80G", 1), 240, 187),
    _Printed(Setup("Llama-3-8B", "A100-80G", 2), 258, 203),
    _Printed(Setup("Yi-34B", "A100-80G", 2), 68, 56),
)


def block_sizes(bench: Bench, folder: Path) -> Report:
    """Table 8."""
    task = bench.progress.add_task("vAttention, Table 8", total=len(_TABLE_8))
    rows, series = [], []
    for (model, num_gpus), printed in _TABLE_8.items():
        found = [_groups(model, num_gpus, kib).block_size for kib in _GROUPS_KIB]
        name = f"{model}, TP-{num_gpus}"
        rows += [
            Row(f"{name}, {_size(kib)}", (paper,), ours, "", 0)
            for kib, paper, ours in zip(_GROUPS_KIB, printed, found, strict=True)
        ]
        series.append((name, _GROUPS_KIB, found))
        bench.progress.advance(task)
    plots.lines(
        folder / "vattention_table8.png", ("KiB of a page group", "tokens"), series, log_y=True
    )
    return Report(
        "vattention_table8",
        "vAttention, Table 8: tokens in a page group",
        "A page group of one K or V tensor of one layer, on each of the GPUs.",
        rows,
        plot="vattention_table8.png",
    )


def largest_batches(bench: Bench, folder: Path) -> Report:
    """Fig. 15."""
    task = bench.progress.add_task("vAttention, Fig. 15", total=len(_FIG_15) * len(_GROUPS_KIB))
    rows, clusters, columns = [], [], []
    for printed in _FIG_15:
        batches = []
        for kib in _GROUPS_KIB:
            batches.append(_largest_batch(bench, printed.setup, kib))
            bench.progress.advance(task)
        papers: list[tuple[float, ...]] = [
            (printed.smallest_groups,),
            (),
            (),
            (printed.largest_groups,),
        ]
        name = printed.setup.model
        rows += [
            Row(f"{name}, {_size(kib)}", paper, ours, _REMARK if paper else "", 0)
            for kib, paper, ours in zip(_GROUPS_KIB, papers, batches, strict=True)
        ]
        gain = printed.smallest_groups / printed.largest_groups
        rows.append(Row(f"{name}, 64 KiB in 2 MiB", (gain,), batches[0] / batches[-1]))
        sizes = [
            _groups(name, printed.setup.num_gpus, kib).block_size
            for kib in (_GROUPS_KIB[0], _GROUPS_KIB[-1])
        ]
        printed_ends = (printed.smallest_groups, printed.largest_groups)
        implied = _implied_tokens(printed_ends, sizes)
        ours = _implied_tokens((batches[0], batches[-1]), sizes)
        rows.append(Row(f"{name}, tokens per request that both imply", (implied,), ours, "", 0))
        clusters.append(name)
        columns.append(batches)
    by_size = zip(_GROUPS_KIB, zip(*columns, strict=True), strict=True)
    plots.bars(
        folder / "vattention_fig15.png",
        clusters,
        [plots.Group(_size(kib), values) for kib, values in by_size],
        "largest batch",
    )
    return Report(
        "vattention_fig15",
        "vAttention, Fig. 15: largest batch",
        f"{'; '.join(str(each.setup) for each in _FIG_15)}. Conversations at {_RATE:g} requests/s "
        f"for {bench.seconds(_SECONDS):.0f} s, at most 512 at once, 90 % of the GPUs' memory.",
        rows,
        [
            "From the paper's two printed batches follows how long its requests are, if each "
            "leaves half of its last page group empty: 3,500 tokens (2,300 with Yi-34B), twice as "
            "long as the lengths that are known of OpenChat. So its batches are smaller, and less "
            "of its memory is lost in 2 MiB groups."
        ],
        "vattention_fig15.png",
    )


_REMARK = (
    "requests are shorter here: the lengths of the paper's OpenChat trace are not printed, these "
    "are those of Sarathi-Serve"
)


def _implied_tokens(batches: Sequence[float], sizes: Sequence[int]) -> float:
    """Mean length of a request.

    It assumes that the same memory holds both batches, and that last page groups are half full.
    """
    small, large = batches
    if small == large:
        return float("nan")
    return (large * sizes[1] / 2 - small * sizes[0] / 2) / (small - large)


def _largest_batch(bench: Bench, setup: Setup, kib: int) -> float:
    worker = setup.worker()
    memory_bytes = worker.kv_slots * worker.model.kv_bytes_per_token // setup.num_gpus
    system = VAttention(_groups(setup.model, setup.num_gpus, kib), memory_bytes)
    seconds = bench.seconds(_SECONDS)
    requests = bench.workload(Kind.OPENCHAT).requests(_RATE, seconds, seed=0)
    outcome = run(system, requests, worker, until_s=seconds, sample_every_s=_EACH_S)
    return float(max(moment.num_running for moment in outcome.moments))


def _groups(model_name: str, num_gpus: int, kib: int) -> PageGroups:
    model = find_model(model_name)
    return PageGroups(
        group_bytes=kib * _KIB,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads // num_gpus,
        head_dim=model.head_dim,
    )


def _size(kib: int) -> str:
    return f"{kib} KiB" if kib < _KIB else f"{kib // _KIB} MiB"
