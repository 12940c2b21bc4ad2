"""A fleet on this machine: its prefix caches, and streams whose engine drains or dies.

    python -m benchmarks.serving.fleet_streams [--engines 3] [--gateways 2] [--json FILE]

*Conversations* of several turns, in random order and through all gateways, on a fleet and on one
engine with as many blocks as all of it: prompt tokens that came from prefix caches. *Streams*:
``--streams`` at once, sampled with seeds, undisturbed and then while an engine drains (SIGTERM to
its scheduler), and while scheduler, worker and Redis of an engine are killed and stay away. Their
texts must be equal; shown is the longest silence of each. Before the kill an engine is added, and
the time from its first lease as a ready engine until it gets a request is measured.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.progress import show
from benchmarks.serving.conversations import Conversations, Turn, losses
from benchmarks.serving.http_stream import RawAnswer, StreamFailed, Target, ask
from benchmarks.serving.launched_services import serving
from benchmarks.serving.processes import service_pid
from benchmarks.serving.server_process import NotServed
from deploy.redis.ports import free_port
from deploy.redis.server import private_endpoint
from shared.bus.keys import engine_lease
from shared.bus.redis_bus import RedisBus
from shared.messages.leases import EngineInfo, decode_lease

_FLEET, _PATH = "deploy.fleet", "/v1/completions"
_ADDED = "engine-added"
_LOADED_S = 120.0
_ADDED_S = 30.0
_LOOK_S = 0.01
_POLL_S = 0.05


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


async def until_ready_s(directory_url: str) -> float:
    """Wait until the engine that was added has a lease as a ready one; seconds until then.

    Raises:
        TimeoutError: it gets none.
    """
    bus, began_s = RedisBus(directory_url), time.monotonic()
    try:
        async with asyncio.timeout(_LOADED_S):
            while True:
                data = await bus.get(engine_lease(_ADDED))
                if data is not None and decode_lease(EngineInfo, data, _ADDED).state == "ready":
                    return time.monotonic() - began_s
                await asyncio.sleep(_LOOK_S)
    finally:
        await bus.close()


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
        one_turns = _converse(args, [port])
        found["one engine"] = _sums(one_turns)
    port = free_port()
    ports = [port + number for number in range(args.gateways)]
    counts = ["--engines", str(args.engines), "--gateways", str(args.gateways)]
    several = [*flags, *counts, "--num-blocks", str(args.num_blocks)]
    with serving(fleet, port, several, _FLEET):
        turns = _converse(args, ports)
        found["fleet"] = _sums(turns)
        found["losses"] = [asdict(loss) for loss in losses(one_turns, turns)]
        if not args.streams:
            return found
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
            found["loaded_s"] = uvloop.run(until_ready_s(url))
            found["added_s"] = uvloop.run(first_request_s(port))
        show(f"the engine that was added got a request {found['added_s']:.2f} s after its lease")
        try:
            runs.append(uvloop.run(streams.run("killed", lambda: kill_for_good(fleet, "engine-1"))))
        finally:
            go_on(fleet)
        show(str(runs[-1]))
    return found


def _converse(args: argparse.Namespace, ports: list[int]) -> list[Turn]:
    given = (args.conversations, args.turns, args.seed, ports)
    turns = uvloop.run(Conversations(*given).run())
    show(f"conversations: {_sums(turns)}")
    return turns


def _sums(turns: Sequence[Turn]) -> dict[str, int]:
    return {
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "cached_tokens": sum(turn.cached_tokens for turn in turns),
    }


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
    lines += [
        "| turns of conversations in the fleet | number | cached tokens less |",
        "|---|---|---|",
    ]
    lines += [
        f"| {loss['why']} | {loss['num_turns']} | {loss['num_tokens']:,} |"
        for loss in found["losses"]
    ]
    if "streams" not in found:
        return "\n".join(lines)
    lines.append("")
    lines += ["| streams | complete | equal texts | longest pause, s | median |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {run['name']} | {run['complete']} | {run['equal']} "
        f"| {run['longest_pause_s']:.2f} | {run['median_pause_s']:.2f} |"
        for run in found["streams"]
    ]
    added = f"Added engine: first request {found['added_s']:.2f} s after its lease as a ready one"
    return "\n".join([*lines, "", added])


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
    add("--streams", type=int, default=64, help="0: conversations only")
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
    return int(any(run["equal"] < args.streams for run in found.get("streams", ())))


if __name__ == "__main__":
    sys.exit(main())
