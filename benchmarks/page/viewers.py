"""Tokens per second of a server that is looked at, and of one that is not, in turns.

Streams run without a pause. The feeds' clients drop what they read, at the lowest priority, so that
the cores are the server's and the load generator's.
"""

import asyncio
import os
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.serving.http_stream import Target, ask
from benchmarks.serving.latencies import read_answer
from benchmarks.serving.launched_services import SERVICES, service_pids
from benchmarks.serving.load import Load, find_model
from deploy.settings import REPOSITORY

_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 128
_WARM_S = 3.0
_SETTLE_S = 0.5  # after viewers came or went
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_OURS = (*SERVICES, "viewers", "load generator")


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the load with so many viewers.

    Attributes:
        cpu_s: processor time of each process.
        num_bytes: that the viewers read.
    """

    num_viewers: int
    began_s: float
    ended_s: float
    cpu_s: dict[str, float]
    num_bytes: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended_s - self.began_s


@dataclass(slots=True)
class Measured:
    """All windows of a run, and when tokens came."""

    windows: list[Window] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)

    def tokens_per_s(self) -> list[float]:
        """Of each window."""
        moments = sorted(self.token_times_s)
        return [
            (bisect_left(moments, one.ended_s) - bisect_left(moments, one.began_s)) / one.seconds
            for one in self.windows
        ]


async def measure(
    port: int, folder: Path, num_streams: int, viewers: Sequence[int], rounds: int, seconds: float
) -> Measured:
    """Let windows with and without viewers take turns.

    Args:
        folder: as given to ``serving``.
        viewers: numbers of them, each of which gets ``rounds`` windows between two without any.

    Raises:
        StreamFailed: a request failed.
    """
    url = f"http://127.0.0.1:{port}"
    model = await find_model(Target.of(url, "/v1/models", None))
    load = Load("completions", model, _PROMPT_TOKENS, _OUTPUT_TOKENS)
    looking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.page.dropping_viewers", str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    pids = {**service_pids(folder), "viewers": looking.pid, "load generator": os.getpid()}
    measured = Measured()
    turns = [number for _ in range(rounds) for some in viewers for number in (0, some)]
    over, moments = asyncio.Event(), measured.token_times_s
    clients = asyncio.gather(*(_client(url, load, n, moments, over) for n in range(num_streams)))
    try:
        await asyncio.sleep(_WARM_S)
        for number in [*turns, 0]:
            await _look(looking, number)
            await asyncio.sleep(_SETTLE_S)
            before, began_s = _cpu_s(pids), time.perf_counter()
            done, _ = await asyncio.wait([clients], timeout=seconds)
            if done:
                await clients  # raises
            after, ended_s = _cpu_s(pids), time.perf_counter()
            spent = {name: after[name] - before[name] for name in pids}
            num_bytes = await _look(looking, 0)
            measured.windows.append(Window(number, began_s, ended_s, spent, num_bytes))
        over.set()
        await clients
    finally:
        clients.cancel()
        assert looking.stdin is not None
        looking.stdin.close()
        await looking.wait()
    return measured


async def _look(looking: asyncio.subprocess.Process, num_viewers: int) -> int:
    """Let so many viewers look; the bytes that those before have read."""
    assert looking.stdin is not None
    assert looking.stdout is not None
    looking.stdin.write(f"{num_viewers}\n".encode())
    return int(await looking.stdout.readline())


async def _client(
    url: str, load: Load, seed: int, token_times_s: list[float], over: asyncio.Event
) -> None:
    """Send one request after the other; note when tokens came."""
    target, rng = Target.of(url, "/v1/completions", None), random.Random(seed)
    while not over.is_set():
        # Of different lengths, so that streams do not begin and end together.
        sized = replace(
            load, output_tokens=rng.randint(_OUTPUT_TOKENS // 2, _OUTPUT_TOKENS * 3 // 2)
        )
        answer = read_answer(await ask(target, sized.body(rng, 0)))
        moments = answer.arrivals_s  # some events have several tokens
        places = range(answer.output_tokens)
        token_times_s += [moments[n * len(moments) // answer.output_tokens] for n in places]


def _cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """Processor time of each process so far."""
    found = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return found


def table(measured: Measured) -> str:
    """The medians in Markdown; ratios are to the two windows beside, which had no viewers."""
    windows, rates = measured.windows, measured.tokens_per_s()
    numbers = sorted({one.num_viewers for one in windows})
    heads = ["no viewers", *(f"{n} viewer{'s' if n > 1 else ''}" for n in numbers if n)]
    of = {n: [i for i, one in enumerate(windows) if one.num_viewers == n] for n in numbers}
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]

    def row(title: str, values: list[str]) -> None:
        lines.append(f"| {title} | " + " | ".join(values) + " |")

    row("tokens/s", [f"{median(rates[i] for i in of[n]):.0f}" for n in numbers])
    ratios = {n: [_ratio(rates, i) for i in of[n]] for n in numbers if n}
    row("ratio to the windows beside", ["", *(f"{median(r):.3f}" for r in ratios.values())])
    row("– quartiles", ["", *(_quartiles(found) for found in ratios.values())])
    for name in _OURS:
        cpus = {n: [windows[i].cpu_s[name] / windows[i].seconds for i in of[n]] for n in numbers}
        row(f"CPUs of the {name}", [f"{median(found):.3f}" for found in cpus.values()])
    costs = {n: [_server_cost(windows, rates, i) for i in of[n]] for n in numbers if n}
    row(
        "CPUs more of all services, at the same tokens/s",
        ["", *(f"{median(found):.3f}" for found in costs.values())],
    )
    sent = {n: [windows[i].num_bytes / windows[i].seconds for i in of[n]] for n in numbers}
    row("KiB/s of all viewers", [f"{median(found) / 1024:.0f}" for found in sent.values()])
    return "\n".join(lines)


def _ratio(rates: list[float], at: int) -> float:
    return 2 * rates[at] / (rates[at - 1] + rates[at + 1])


def _server_cost(windows: list[Window], rates: list[float], at: int) -> float:
    """Processor time of the services a second, beyond what as many tokens cost beside."""

    def per_token(i: int) -> float:
        spent = sum(windows[i].cpu_s[name] for name in SERVICES)
        return spent / windows[i].seconds / rates[i]

    beside = (per_token(at - 1) + per_token(at + 1)) / 2
    return (per_token(at) - beside) * rates[at]


def _quartiles(found: list[float]) -> str:
    ordered = sorted(found)
    quarter = len(ordered) // 4
    return f"{ordered[quarter]:.3f} to {ordered[-1 - quarter]:.3f}"
