"""Compares ways to route requests to the engines of a fleet, on a virtual clock.

    python -m benchmarks.fleet --engines 1000 --requests 100000
    python -m benchmarks.fleet --engines 100 --trace mooncake_conversation.jsonl.gz --speed-up 20
    python -m benchmarks.fleet --engines 1000 --requests 100000 --gateways 4

Engines have a queue of prompts, a prefix cache with LRU blocks, and sequences that decode. ``ours``
is the gateway's own code: it has loads from leases that are up to half a second old, and caches
from what gateways have sent. With several gateways, requests arrive at any of them; ``not shared``
are gateways that have their own choices alone. The oracle has the same score, and sees all loads
and caches as they are. Without a trace, conversations of several turns are made up: each begins
with one of many system prompts, and each turn repeats all before it.
"""

import argparse
import bisect
import heapq
import itertools
import json
import random
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.simulator.traces import TraceError, read_trace, sped_up
from gateway.fleet.prefix_index import PrefixIndex, PromptPrefixes
from gateway.fleet.routing import LOAD_WEIGHT, Choice, EngineLoad, choose, mean_load

_POLL_S = 0.5
_SHARED_S = 0.1  # after a choice, other gateways have it
_BOUND = 1.25  # of consistent hashing: no engine has more than this share of the mean
_RING_POINTS = 50  # of an engine
_OURS, _NOT_SHARED = "ours", "not shared"


@dataclass(frozen=True, slots=True)
class Request:
    """A request with the names of its leading blocks, which tell their whole prefix."""

    arrival_s: float
    blocks: tuple[int, ...]
    num_prompt: int  # tokens
    num_output: int


@dataclass(slots=True)
class EngineModel:
    """One engine.

    Args:
        block_tokens: of a block in the prefix cache.
        cache_blocks: that it holds.
        prefill_tokens_per_s: prompts are computed one after the other.
        token_s: between two tokens of a sequence that decodes.
    """

    block_tokens: int
    cache_blocks: int
    prefill_tokens_per_s: float
    token_s: float
    num_open: int = 0
    free_s: float = 0.0  # when all prompts that wait are computed
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of a prompt that are in the cache."""
        num_blocks = 0
        for name in request.blocks:
            if name not in self.cache:
                break
            num_blocks += 1
        return min(num_blocks * self.block_tokens, request.num_prompt - 1)

    def waiting_tokens(self, now_s: float) -> int:
        """Prompt tokens that are still to be computed."""
        return int(max(0.0, self.free_s - now_s) * self.prefill_tokens_per_s)

    def take(self, request: Request, now_s: float) -> tuple[int, float, float]:
        """Compute a request; tokens from the cache, time of the first token, and of the end."""
        cached = self.cached_tokens(request)
        begin_s = max(now_s, self.free_s)
        self.free_s = begin_s + (request.num_prompt - cached) / self.prefill_tokens_per_s
        for name in reversed(request.blocks):
            self.cache[name] = None
            self.cache.move_to_end(name)
        while len(self.cache) > self.cache_blocks:
            self.cache.popitem(last=False)
        self.num_open += 1
        return cached, self.free_s, self.free_s + request.num_output * self.token_s


Route = Callable[[Request, int], int]
"""Maps a request and its number to the index of an engine."""


class GatewayUnderTest:
    """The gateway's own routing, in one gateway."""

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        self._engines = engines
        self.index = PrefixIndex()
        self._loads = [EngineLoad(str(number)) for number in range(len(engines))]
        self._by_name = {load.name: load for load in self._loads}
        self._mean = 1.0
        self.seconds: list[float] = []

    def poll(self, now_s: float) -> None:
        """Read all leases."""
        for engine, load in zip(self._engines, self._loads, strict=True):
            load.take_lease(engine.num_open, engine.waiting_tokens(now_s))
        self._mean = mean_load(self._loads)

    def route(self, request: Request, number: int) -> Choice:
        """Choose the engine of a request."""
        size = self._engines[0].block_tokens
        lengths = range(size, size * len(request.blocks) + 1, size)
        prompt = PromptPrefixes(list(request.blocks), lengths, request.num_prompt)
        name = f"{random.Random(number).getrandbits(128):032x}"
        began = time.perf_counter()
        expected = self.index.expected(prompt)
        found = choose(name, request.num_prompt, expected, self._loads, self._mean, self._by_name)
        self.seconds.append(time.perf_counter() - began)
        self.take(request, found)
        return found

    def take(self, request: Request, choice: Choice) -> None:
        """Enter a choice of this gateway or of another."""
        self.index.sent(request.blocks, choice.engine)
        self._by_name[choice.engine].send(request.num_prompt - choice.expected_tokens)


class GatewaysUnderTest:
    """Gateways that get requests at random, and each other's choices a little later.

    Args:
        is_shared: otherwise each has its own choices alone.
    """

    def __init__(self, engines: Sequence[EngineModel], count: int, is_shared: bool) -> None:
        self.gateways = [GatewayUnderTest(engines) for _ in range(count)]
        self._is_shared = is_shared and count > 1
        self._on_their_way: deque[tuple[float, GatewayUnderTest, Request, Choice]] = deque()

    def poll(self, now_s: float) -> None:
        """Let all gateways read all leases."""
        for gateway in self.gateways:
            gateway.poll(now_s)

    def __call__(self, request: Request, number: int) -> int:
        while self._on_their_way and self._on_their_way[0][0] <= request.arrival_s:
            _, sender, earlier, choice = self._on_their_way.popleft()
            for gateway in self.gateways:
                if gateway is not sender:
                    gateway.take(earlier, choice)
        chosen_by = random.Random(~number).choice(self.gateways)
        choice = chosen_by.route(request, number)
        if self._is_shared:
            due_s = request.arrival_s + _SHARED_S
            self._on_their_way.append((due_s, chosen_by, request, choice))
        return int(choice.engine)


def round_robin(engines: Sequence[EngineModel]) -> Route:
    """One engine after the other."""
    return lambda _, number: number % len(engines)


def least_loaded(engines: Sequence[EngineModel]) -> Route:
    """The engine with the fewest requests, as it is now."""
    indices = range(len(engines))
    return lambda _, __: min(indices, key=lambda index: engines[index].num_open)


def bounded_hashing(engines: Sequence[EngineModel]) -> Route:
    """Consistent hashing of the first block with bounded loads (Mirrokni et al., SODA 2018)."""
    points = sorted(
        (random.Random(f"{index}.{point}").random(), index)
        for index in range(len(engines))
        for point in range(_RING_POINTS)
    )
    ring = [position for position, _ in points]

    def route(request: Request, number: int) -> int:
        bound = _BOUND * (1 + sum(engine.num_open for engine in engines) / len(engines))
        key = request.blocks[0] if request.blocks else number
        at = bisect.bisect(ring, random.Random(key).random())
        for step in range(len(points)):
            index = points[(at + step) % len(points)][1]
            if engines[index].num_open < bound:
                return index
        return number % len(engines)

    return route


def oracle(engines: Sequence[EngineModel]) -> Route:
    """The same score as ours, for all engines, with their loads and caches as they are."""

    def route(request: Request, _: int) -> int:
        loads = [EngineLoad("") for _ in engines]
        for engine, load in zip(engines, loads, strict=True):
            load.take_lease(engine.num_open, engine.waiting_tokens(request.arrival_s))
        mean = mean_load(loads)

        def score(engine: EngineModel, load: EngineLoad) -> float:
            share = engine.cached_tokens(request) / request.num_prompt
            return share - LOAD_WEIGHT * (load.value - mean) / mean

        return max(range(len(engines)), key=lambda index: score(engines[index], loads[index]))

    return route


def conversations(
    num_requests: int, rate: float, num_systems: int, block_tokens: int, seed: int
) -> Iterator[Request]:
    """Requests of made-up conversations, in the order of arrival.

    Args:
        rate: requests per second.
        num_systems: different system prompts, of 512 to 4,096 tokens.
    """
    rng = random.Random(seed)
    names = itertools.count(1)
    systems: list[tuple[int, ...]] = []
    for _ in range(num_systems):
        count = rng.randint(512, 4_096) // block_tokens
        systems.append(tuple(next(names) for _ in range(count)))
    waiting: list[tuple[float, int, tuple[int, ...], int]] = []  # a heap of next turns
    start_s, order = 0.0, itertools.count()
    for _ in range(num_requests):
        start_s += rng.expovariate(rate)
        if waiting and waiting[0][0] <= start_s:
            _, _, before, left = heapq.heappop(waiting)
        else:
            before, left = systems[int(len(systems) * rng.random() ** 2)], rng.randint(1, 8)
        num_new, num_output = rng.randint(32, 800), rng.randint(50, 500)
        blocks = before + tuple(next(names) for _ in range(num_new // block_tokens))
        num_prompt = len(blocks) * block_tokens + rng.randint(1, block_tokens - 1)
        yield Request(start_s, blocks, num_prompt, num_output)
        if left > 1:
            answered = tuple(next(names) for _ in range(num_output // block_tokens))
            later_s = start_s + rng.expovariate(1 / 30.0)
            heapq.heappush(waiting, (later_s, next(order), blocks + answered, left - 1))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a way to route comes to."""

    name: str
    hit_rate: float  # of prompt tokens
    ttft_p50_s: float
    ttft_p99_s: float
    imbalance: float  # the most loaded engine's requests by the mean, averaged over arrivals
    choice_us: float  # median; 0: not measured
    choice_us_p99: float
    index_prefixes: int


def simulate(
    name: str,
    requests: Sequence[Request],
    make: Callable[[], Sequence[EngineModel]],
    num_gateways: int,
) -> Outcome:
    """Route all requests in one way."""
    engines = make()
    ours = GatewaysUnderTest(engines, num_gateways, is_shared=name != _NOT_SHARED)
    ways = {
        "round robin": round_robin,
        "least loaded": least_loaded,
        "bounded hashing": bounded_hashing,
        "oracle": oracle,
    }
    route: Route = ways[name](engines) if name in ways else ours
    ends: list[tuple[float, int]] = []
    ttft_s, imbalances = [], []
    cached = total = 0
    next_poll_s = 0.0
    for number, request in enumerate(requests):
        now_s = request.arrival_s
        while ends and ends[0][0] <= now_s:
            engines[heapq.heappop(ends)[1]].num_open -= 1
        if now_s >= next_poll_s:
            ours.poll(now_s)
            next_poll_s = now_s + _POLL_S
            loads = [engine.num_open for engine in engines]
            imbalances.append(max(loads) / max(1.0, sum(loads) / len(loads)))
        index = route(request, number)
        hit, first_s, end_s = engines[index].take(request, now_s)
        heapq.heappush(ends, (end_s, index))
        ttft_s.append(first_s - now_s)
        cached, total = cached + hit, total + request.num_prompt
    seconds = [choice for gateway in ours.gateways for choice in gateway.seconds]
    times_us = np.array(seconds or [0.0]) * 1e6
    return Outcome(
        name,
        cached / total,
        float(np.median(ttft_s)),
        float(np.percentile(ttft_s, 99)),
        float(np.mean(imbalances)),
        float(np.median(times_us)),
        float(np.percentile(times_us, 99)),
        max(len(gateway.index) for gateway in ours.gateways),
    )


def read_requests(args: argparse.Namespace) -> tuple[list[Request], int]:
    """Requests of the trace, or of made-up conversations, and the tokens of their blocks.

    Raises:
        TraceError: the trace cannot be read.
    """
    if args.trace is None:
        rate, size = args.rate * args.engines, 64
        return list(conversations(args.requests, rate, args.systems, size, args.seed)), size
    found = list(sped_up(read_trace(args.trace), args.speed_up))
    requests = [
        Request(one.arrival_s, one.prefix, one.prompt_tokens, one.output_tokens) for one in found
    ]
    return requests, found[0].prefix_block_tokens


def main() -> None:
    """Print a table, a row for each way to route."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=50_000, help="of made-up conversations")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second and engine")
    parser.add_argument("--systems", type=int, default=500, help="different system prompts")
    parser.add_argument("--trace", type=Path, help="of Mooncake, instead of made-up conversations")
    parser.add_argument("--speed-up", type=float, default=1.0, help="of the trace's arrivals")
    parser.add_argument("--cache-tokens", type=int, default=400_000, help="of an engine")
    parser.add_argument("--prefill", type=float, default=10_000.0, help="tokens per second")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[], help="ways that are left out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        requests, block_tokens = read_requests(args)
    except TraceError as error:
        sys.exit(f"error: {error}")

    def make() -> Sequence[EngineModel]:
        cache_blocks = args.cache_tokens // block_tokens
        return [
            EngineModel(block_tokens, cache_blocks, args.prefill, 0.02) for _ in range(args.engines)
        ]

    names = ["round robin", "least loaded", "bounded hashing", _OURS, "oracle"]
    if args.gateways > 1:
        names.insert(3, _NOT_SHARED)
    outcomes = [
        simulate(name, requests, make, args.gateways) for name in names if name not in args.without
    ]
    if args.json:
        rows = [{key: getattr(one, key) for key in Outcome.__slots__} for one in outcomes]
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=f"{len(requests)} requests on {args.engines} engines")
    for column in ("", "hit rate", "TTFT p50", "p99 s", "imbalance", "choice us", "p99 us"):
        table.add_column(column, justify="left" if not column else "right")
    for one in outcomes:
        table.add_row(
            one.name,
            f"{one.hit_rate:.3f}",
            f"{one.ttft_p50_s:.3f}",
            f"{one.ttft_p99_s:.3f}",
            f"{one.imbalance:.2f}",
            f"{one.choice_us:.1f}" if one.choice_us else "",
            f"{one.choice_us_p99:.1f}" if one.choice_us else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
