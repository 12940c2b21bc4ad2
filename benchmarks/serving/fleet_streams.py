"""A fleet on this machine: its prefix caches, and streams whose engine drains or dies.

    python -m benchmarks.serving.fleet_streams [--engines 3] [--gateways 2] [--json FILE]

*Conversations* of several turns, in random order and through all gateways, on a fleet and on one
engine with as many blocks as all of it: prompt tokens that came from prefix caches. *Streams*:
``--streams`` at once, sampled with seeds, undisturbed and then while an engine drains (SIGTERM to
its scheduler), and while scheduler, worker and Redis of an engine are killed and stay away. Their
texts must be equal; shown is the longest silence of each. Before the kill an engine is added, and
the time from its ready line until it gets the first request is measured.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.serving.http_stream import RawAnswer, StreamFailed, Target, ask
from benchmarks.serving.launched_services import serving
from benchmarks.serving.processes import service_pid
from benchmarks.serving.server_process import NotServed
from deploy.redis.ports import free_port
from deploy.redis.server import private_endpoint

_FLEET, _PATH = "deploy.fleet", "/v1/completions"
_CLIENTS = 12  # of conversations
_ADDED = "engine-added"
_ADDED_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Cached:
    """Prompt tokens of all calls."""

    prompt_tokens: int
    cached_tokens: int


class Conversations:
    """Conversations whose turns repeat all before them, in the same order for the same seed."""

    def __init__(self, args: argparse.Namespace, ports: list[int]) -> None:
        rng = random.Random(args.seed)
        self._targets = [Target.of(f"http://127.0.0.1:{port}", _PATH, None) for port in ports]
        systems = [_words(rng, 120) for _ in range(max(1, args.conversations // 10))]
        self._texts = [rng.choice(systems) for _ in range(args.conversations)]
        self._turns = [index for index in range(args.conversations) for _ in range(args.turns)]
        rng.shuffle(self._turns)
        self._asked = [[_words(rng, 30) for _ in range(args.turns)] for _ in self._texts]
        self._locks = [asyncio.Lock() for _ in self._texts]
        self._cached = self._prompt = self._num_sent = 0

    async def run(self) -> Cached:
        """Run all of them."""
        waiting = iter(self._turns)

        async def client() -> None:
            for index in waiting:
                async with self._locks[index]:
                    await self._turn(index)

        await asyncio.gather(*(client() for _ in range(_CLIENTS)))
        return Cached(self._prompt, self._cached)

    async def _turn(self, index: int) -> None:
        self._texts[index] += self._asked[index].pop()
        self._num_sent += 1
        target = self._targets[self._num_sent % len(self._targets)]
        body = {"model": "demo", "prompt": self._texts[index], "max_tokens": 32, "temperature": 0}
        found = json.loads((await ask(target, {**body, "ignore_eos": True})).body)
        self._texts[index] += found["choices"][0]["text"]
        usage = found["usage"]
        self._prompt += usage["prompt_tokens"]
        self._cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _words(rng: random.Random, count: int) -> str:
    return "".join(f" {rng.choice('abcdefgh')}{rng.randrange(100)}" for _ in range(count))


class Streams:
    """The same streams again and again.

    Args:
        ports: of the gateways, which they use in turn.
    """

    def __init__(self, args: argparse.Namespace, ports: list[int]) -> None:
        self._targets = [Target.of(f"http://127.0.0.1:{port}", _PATH, None) for port in ports]
        self._after_s = args.after
        self._bodies = [
            {
                "model": "demo",
                "prompt": f"Chapter {number}. The captain said",
                "max_tokens": args.output_tokens,
                "temperature": 1.0,
                "seed": number,
                "ignore_eos": True,
                "stream": True,
            }
            for number in range(args.streams)
        ]
        self._texts: list[str] = []

    async def run(self, name: str, disturb: Any = None) -> dict[str, Any]:
        """Run all of them, and call ``disturb`` in the middle; what came of it."""
        calls = [
            asyncio.create_task(ask(self._targets[number % len(self._targets)], body))
            for number, body in enumerate(self._bodies)
        ]
        if disturb is not None:
            await asyncio.sleep(self._after_s)
            num_before = sum(call.done() for call in calls)
            disturb()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        whole = [answer for answer in answers if isinstance(answer, RawAnswer)]
        texts = [_text(answer) if isinstance(answer, RawAnswer) else "" for answer in answers]
        self._texts = self._texts or texts
        pauses_s = [float(max(np.diff([moment for moment, _ in one.events]))) for one in whole]
        return {
            "name": name,
            "complete": sum(answer.events[-1][1] == b"[DONE]" for answer in whole),
            "equal": sum(text == first for text, first in zip(texts, self._texts, strict=True)),
            "ended_before": num_before if disturb is not None else 0,
            "longest_pause_s": max(pauses_s, default=0.0),
            "median_pause_s": float(np.median(pauses_s)) if pauses_s else 0.0,
            "problems": sorted(
                {str(found) for found in answers if isinstance(found, StreamFailed)}
            ),
        }


def _text(answer: RawAnswer) -> str:
    events = [json.loads(data) for _, data in answer.events if data != b"[DONE]"]
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


def drain(folder: Path, engine: str) -> None:
    """SIGTERM to the scheduler of an engine."""
    spawner = int((folder / "run" / f"{engine}-scheduler.pid").read_text())
    os.kill(service_pid(spawner), signal.SIGTERM)


def kill_for_good(folder: Path, engine: str) -> None:
    """Kill all processes of an engine; the launcher is stopped, so that it starts none again."""
    pids = {
        name: int((folder / "run" / f"{engine}-{name}.pid").read_text())
        for name in ("scheduler", "worker", "redis")
    }
    os.kill(_parent(pids["redis"]), signal.SIGSTOP)
    services = [service_pid(pids[name]) for name in ("scheduler", "worker")]
    for pid in (*services, *pids.values()):
        os.kill(pid, signal.SIGKILL)


def go_on(folder: Path) -> None:
    """Let the launcher run again."""
    os.kill(_parent(int((folder / "run" / "gateway-0.pid").read_text())), signal.SIGCONT)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def first_request_s(port: int) -> float:
    """Send short requests until the engine that was added gets one; seconds until then.

    Raises:
        TimeoutError: it gets none.
    """
    target = Target.of(f"http://127.0.0.1:{port}", _PATH, None)
    metrics = Target.of(f"http://127.0.0.1:{port}", "/metrics", None)
    began_s, calls = time.monotonic(), []
    async with asyncio.timeout(_ADDED_S):
        for number in range(10_000):
            body = {"model": "demo", "prompt": f"{number} is", "max_tokens": 64}
            calls.append(asyncio.create_task(ask(target, body)))
            await asyncio.sleep(_POLL_S)
            if f'to_engine="{_ADDED}"'.encode() in (await ask(metrics, None)).body:
                break
    taken_s = time.monotonic() - began_s
    await asyncio.gather(*calls)
    return taken_s


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything."""
    flags = ["--dtype", "float32", "--num-threads", "1", "--num-host-blocks", "0"]
    found: dict[str, Any] = {}
    one, fleet = folder / "one", folder / "fleet"
    one.mkdir()
    fleet.mkdir()
    port = free_port()
    big = [*flags, "--num-blocks", str(args.engines * args.num_blocks)]
    with serving(one, port, big):
        found["one engine"] = uvloop.run(_converse(args, [port]))
    port = free_port()
    ports = [port + number for number in range(args.gateways)]
    counts = ["--engines", str(args.engines), "--gateways", str(args.gateways)]
    several = [*flags, *counts, "--num-blocks", str(args.num_blocks)]
    with serving(fleet, port, several, _FLEET):
        found["fleet"] = uvloop.run(_converse(args, ports))
        runs = found["streams"] = []
        streams = Streams(args, ports)
        runs.append(uvloop.run(streams.run("undisturbed")))
        show(str(runs[-1]))
        runs.append(uvloop.run(streams.run("drained", lambda: drain(fleet, "engine-0"))))
        show(str(runs[-1]))
        added = folder / "added"
        added.mkdir()
        url = private_endpoint(fleet / "directory-redis").url
        joins = [*flags, "--directory-url", url, "--engine-id", _ADDED]
        with serving(added, free_port(), [*joins, "--num-blocks", str(args.num_blocks)]):
            found["added_s"] = uvloop.run(first_request_s(port))
        show(f"the engine that was added got a request after {found['added_s']:.2f} s")
        try:
            runs.append(uvloop.run(streams.run("killed", lambda: kill_for_good(fleet, "engine-1"))))
        finally:
            go_on(fleet)
        show(str(runs[-1]))
    return found


async def _converse(args: argparse.Namespace, ports: list[int]) -> dict[str, float]:
    cached = await Conversations(args, ports).run()
    share = cached.cached_tokens / cached.prompt_tokens
    show(f"conversations: {cached}, share {share:.3f}")
    return {"prompt_tokens": cached.prompt_tokens, "cached_tokens": cached.cached_tokens}


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    one, fleet = found["one engine"], found["fleet"]
    lines = ["| | prompt tokens | cached |", "|---|---|---|"]
    lines += [
        f"| {name} | {row['prompt_tokens']:,} | {row['cached_tokens'] / row['prompt_tokens']:.3f} |"
        for name, row in (("one engine", one), ("fleet", fleet))
    ]
    ratio = fleet["cached_tokens"] / one["cached_tokens"]
    lines += ["", f"Cached tokens, fleet by one engine: {ratio:.3f}", ""]
    lines += ["| streams | complete | equal texts | longest pause, s | median |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {run['name']} | {run['complete']} | {run['equal']} "
        f"| {run['longest_pause_s']:.2f} | {run['median_pause_s']:.2f} |"
        for run in found["streams"]
    ]
    return "\n".join([*lines, "", f"Added engine: first request after {found['added_s']:.2f} s"])


def show(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Measure and print; 1 if a stream is incomplete or has another text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engines", type=int, default=3)
    add("--gateways", type=int, default=2)
    add("--conversations", type=int, default=100)
    add("--turns", type=int, default=5)
    add("--num-blocks", type=int, default=2_000, help="of each engine, 16 tokens each")
    add("--streams", type=int, default=64)
    add("--output-tokens", type=int, default=600)
    add("--after", type=float, default=3.0, help="seconds from the start to a disturbance")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(args, Path(folder))
        except (NotServed, StreamFailed) as error:
            show(f"failed: {error}")
            return 1
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(run["equal"] < args.streams for run in found["streams"]))


if __name__ == "__main__":
    sys.exit(main())
