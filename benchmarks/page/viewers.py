"""Tokens per second of a server that is looked at, and of one that is not, in turns."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

from benchmarks.serving.http_stream import Target, ask
from benchmarks.serving.latencies import read_answer
from benchmarks.serving.launched_services import service_pids
from benchmarks.serving.load import Load, find_model

_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 128


@dataclass(slots=True)
class Rates:
    """Tokens per second of each round, and processor time of the gateway."""

    tokens_per_s: list[float] = field(default_factory=list)
    gateway_cpus: list[float] = field(default_factory=list)
    bytes_per_s: list[float] = field(default_factory=list)  # of all viewers


async def measure(
    port: int, folder: Path, num_streams: int, num_viewers: int, rounds: int, seconds: float
) -> dict[str, Rates]:
    """Let rounds with and without viewers take turns.

    Raises:
        StreamFailed: a request failed.
    """
    url = f"http://127.0.0.1:{port}"
    model = await find_model(Target.of(url, "/v1/models", None))
    load = Load("completions", model, _PROMPT_TOKENS, _OUTPUT_TOKENS)
    rng = random.Random(1)
    found = {"no viewers": Rates(), f"{num_viewers} viewers": Rates()}
    await _round(url, load, rng, num_streams, 2.0)
    for _ in range(rounds):
        for name, rates in found.items():
            viewers = 0 if name == "no viewers" else num_viewers
            await _measured(rates, url, folder, load, rng, num_streams, viewers, seconds)
    return found


async def _measured(
    rates: Rates,
    url: str,
    folder: Path,
    load: Load,
    rng: random.Random,
    num_streams: int,
    num_viewers: int,
    seconds: float,
) -> None:
    seen = [0]
    looking = [asyncio.create_task(_look(url, seen)) for _ in range(num_viewers)]
    gateway = service_pids(folder)["gateway"]
    before_s, began_s = _cpu_s(gateway), time.perf_counter()
    rates.tokens_per_s.append(await _round(url, load, rng, num_streams, seconds))
    took_s = time.perf_counter() - began_s
    rates.gateway_cpus.append((_cpu_s(gateway) - before_s) / took_s)
    rates.bytes_per_s.append(seen[0] / took_s)
    for task in looking:
        task.cancel()
    await asyncio.gather(*looking, return_exceptions=True)


async def _round(
    url: str, load: Load, rng: random.Random, num_streams: int, seconds: float
) -> float:
    """Tokens per second of clients that send one request after the other."""
    target = Target.of(url, "/v1/completions", None)
    began_s = time.perf_counter()
    until_s = began_s + seconds
    num_tokens = 0

    async def client() -> None:
        nonlocal num_tokens
        while time.perf_counter() < until_s:
            answer = read_answer(await ask(target, load.body(rng, 0)))
            within = [moment < until_s for moment in answer.arrivals_s]
            num_tokens += round(answer.output_tokens * sum(within) / len(within))

    await asyncio.gather(*(client() for _ in range(num_streams)))
    return num_tokens / seconds


async def _look(url: str, seen: list[int]) -> None:
    """Read the feed as an open page does."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http,
        http.stream("GET", "/ui/feed") as response,
    ):
        async for data in response.aiter_raw():
            seen[0] += len(data)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def table(found: dict[str, Rates]) -> str:
    """The medians in Markdown."""
    (_, alone), (name, looked) = found.items()
    ratios = [b / a for a, b in zip(alone.tokens_per_s, looked.tokens_per_s, strict=True)]
    lines = [f"| | no viewers | {name} | ratio of a pair of rounds |", "|---|---|---|---|"]
    rates = f"{median(alone.tokens_per_s):.0f} | {median(looked.tokens_per_s):.0f}"
    lines.append(f"| tokens/s | {rates} | {median(ratios):.3f} |")
    cpus = f"{median(alone.gateway_cpus):.3f} | {median(looked.gateway_cpus):.3f}"
    lines.append(f"| CPUs of the gateway | {cpus} | |")
    lines.append(f"| KiB/s of all viewers | 0 | {median(looked.bytes_per_s) / 1024:.0f} | |")
    return "\n".join(lines)
