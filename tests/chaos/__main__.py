"""``scripts/chaos``: kills and pauses real services under real clients, and compares every text."""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.settings import REPOSITORY
from tests.chaos.cluster import Cluster, NotReady
from tests.chaos.disruptor import Disruptor
from tests.chaos.report import FAILED, HEAD, Row, failures, row_of, verdict
from tests.chaos.scenario import Run, Scenario, disturbed, run_clients
from tests.chaos.workload import Ask, make_asks
from tests.support.tool_template import with_tools

_EACH = ("scheduler", "worker", "gateway", "redis")
SCENARIOS = (
    *(Scenario(f"kill {name}", (name,)) for name in _EACH),
    Scenario("kill any", _EACH),
    *(Scenario(f"pause {name}", (name,), pauses=True) for name in _EACH),
    Scenario("pause any", _EACH, pauses=True),
    Scenario("pressure, undisturbed", (), pressure=True),
    Scenario("pressure, kill any", _EACH, pressure=True),
    Scenario("pressure, pause any", _EACH, pauses=True, pressure=True),
)
_ROOMY = {"PAGESTREAM_NUM_BLOCKS": "1024", "PAGESTREAM_NUM_HOST_BLOCKS": "0"}
_TIGHT = {"PAGESTREAM_NUM_BLOCKS": "20", "PAGESTREAM_NUM_HOST_BLOCKS": "5"}
_NEWS_S = 5.0


class Chaos:
    """Runs all scenarios, one after the other."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._began_s = time.monotonic()
        tokens = (options.min_tokens, options.max_tokens)
        self._asks = make_asks(
            options.seed, options.clients, options.requests, tokens, of_applications=True
        )
        self._model = with_tools(Path(options.model), folder / "model")
        self._expected = Run()
        chosen = [s for s in SCENARIOS if _is_wanted(s.name, options.scenarios)]
        self.scenarios = [Scenario("undisturbed"), *chosen]
        self.rows: list[Row] = []

    async def run(self) -> None:
        """Run the scenarios that fit into the time."""
        undisturbed, *disturbed = self.scenarios
        await self._scenario(undisturbed, self._share_s(len(disturbed) + 1))
        for index, scenario in enumerate(disturbed):
            if not self._expected.outcomes or self._left_s() <= 0:
                return  # nothing to compare with, or no time
            await self._scenario(scenario, self._share_s(len(disturbed) - index))

    def _share_s(self, num_left: int) -> float:
        """Seconds for the next of so many runs."""
        return max(5.0, self._left_s() / num_left)

    def _left_s(self) -> float:
        return 60 * self._options.minutes - (time.monotonic() - self._began_s)

    async def _scenario(self, scenario: Scenario, limit_s: float) -> None:
        folder = self._folder / scenario.name.replace(", ", "-").replace(" ", "-")
        memory = _TIGHT if scenario.pressure else _ROOMY
        settings = memory | {"PAGESTREAM_DTYPE": self._options.dtype}
        run, began_s = Run(), time.monotonic()
        num_ranks = self._options.tensor_parallel_size
        async with Cluster(folder, self._model, settings, num_ranks=num_ranks) as cluster:
            limit_s -= time.monotonic() - began_s
            progress = asyncio.create_task(_show_progress(scenario.name, run))
            try:
                await self._work(scenario, cluster, run, limit_s)
            finally:
                progress.cancel()
                self._conclude(scenario, cluster, run)
            if run is self._expected and cluster.deaths:
                raise NotReady(f"the undisturbed run was disturbed: {cluster.deaths[0]}")

    async def _work(self, scenario: Scenario, cluster: Cluster, run: Run, limit_s: float) -> None:
        options = self._options
        clients = run_clients(
            cluster,
            [[what for what in asks if self._is_known(what)] for asks in self._asks],
            scenario.name.replace(" ", "-"),
            scenario.plain_clients_live,
            limit_s,
            options.deadline,
            run,
        )
        draw = random.Random(f"{options.seed}/{scenario.name}")
        between_s = (options.min_interval, options.max_interval)
        disruptor = Disruptor(cluster, scenario.targets, scenario.pauses, between_s, draw)
        await disturbed(cluster, clients, disruptor, run)

    def _is_known(self, what: Ask) -> bool:
        """The requests that the undisturbed run has answers of; others cannot be compared."""
        return not self.rows or what.key in self._expected.outcomes

    def _conclude(self, scenario: Scenario, cluster: Cluster, run: Run) -> None:
        if not self.rows:
            self._expected = run
        expected = self._expected.outcomes
        self.rows.append(row_of(scenario.name, run, expected))
        _show(str(self.rows[-1]))
        if not self.rows[-1].was_asked:
            _show("  nothing was asked: --minutes leaves no time for it")
        if run.preemptions:
            counts = {kind: round(count) for kind, count in run.preemptions.items()}
            _show(f"  preempted: {counts}")
        for name, starts_s in sorted(cluster.starts_s.items()):
            median_s = sorted(starts_s)[len(starts_s) // 2]
            _show(f"  {name} was back after {median_s:.1f} s in the median of {len(starts_s)}")
        lines = failures(run, expected, cluster.deaths)
        if lines:
            path = cluster.folder / "failures.txt"
            path.write_text("\n".join(lines) + "\n")
            _show(f"  details of what went wrong are in {path}")


def _is_wanted(name: str, words: Sequence[str]) -> bool:
    """Whether a scenario has one of these names, or one of these words in its name."""
    names = {scenario.name for scenario in SCENARIOS}
    return any(word == name or (word in name and word not in names) for word in words)


async def _show_progress(name: str, run: Run) -> None:
    while True:
        await asyncio.sleep(_NEWS_S)
        _show(
            f"  {name}: {run.num_complete} of {run.num_begun} complete, "
            f"{len(run.disruptions)} disruptions"
        )


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="time for everything; what is not done is left")
    add("--clients", type=int, default=8)
    add("--requests", type=int, default=100, help="of each client")
    add("--min-tokens", type=int, default=16, help="shortest answer")
    add("--max-tokens", type=int, default=64, help="longest answer")
    add("--min-interval", type=float, default=1.0, help="seconds from one disruption to the next")
    add("--max-interval", type=float, default=3.0)
    add("--deadline", type=float, default=180.0, help="seconds that an answer may take")
    add("--seed", type=int, default=1)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="workers, which have a part of the model each and are killed and paused one by one",
    )
    add("--model", default=str(REPOSITORY / "models" / "demo"))
    add(
        "--scenarios",
        nargs="+",
        default=[""],
        help="only those of these names, or with such a word in theirs",
    )
    add("--list", action="store_true", help="print the names of all scenarios")
    default = str(REPOSITORY / ".pagestream" / "chaos")
    add("--out", default=default, help="folder in which logs and failures are kept")
    options = parser.parse_args()
    for word in options.scenarios:
        if not any(_is_wanted(scenario.name, [word]) for scenario in SCENARIOS):
            parser.error(f"--scenarios: {word!r} is in the name of none; --list prints them")
    return options


async def _run(chaos: Chaos) -> None:
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await chaos.run()


def main() -> int:
    """0 if all is well, 1 if anything was lost, repeated or changed, 3 if time ran out, 130 if
    interrupted."""
    options = _options()
    if options.list:
        print(*(scenario.name for scenario in SCENARIOS), sep="\n")
        return 0
    folder = Path(options.out) / time.strftime("%Y%m%d-%H%M%S")
    chaos, code, meaning = Chaos(options, folder), 130, "interrupted"
    _show(f"logs in {folder}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    try:
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(_run(chaos))
            exact = options.dtype == "float32"
            code, meaning = verdict(chaos.rows, len(chaos.scenarios), exact)
    except NotReady as error:
        code, meaning = FAILED, f"error: {error}"
    print(HEAD, *chaos.rows, sep="\n")
    _show(f"load {os.getloadavg()[0]:.1f}; exit code {code}: {meaning}")
    return code


if __name__ == "__main__":
    sys.exit(main())
