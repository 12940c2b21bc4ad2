"""A flood by one API key beside a single stream of another: what the latter notices.

    python -m benchmarks.serving.flood [--model smollm2] [--streams 64] [--rounds 3] [--json FILE]

Starts all services with ``scripts/serve`` and two API keys. The one key's client sends one request
after the other. The other key has one such client, too (*equal*), or ``--streams`` of them
(*flood*), in turns, each for ``--seconds``. Shown are the first key's times to the first token and
per token, their ratio, and what the second key gets. Every round ends when the first key's client
has received its last answer; of the second key, tokens within a round count.
"""

import argparse
import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.progress import show
from benchmarks.serving.http_stream import StreamFailed, Target, ask
from benchmarks.serving.latencies import StreamTimes, read_answer
from benchmarks.serving.launched_services import serving
from benchmarks.serving.load import Load, find_model
from benchmarks.serving.server_process import NotServed
from deploy.redis.ports import free_port

_KEYS = {"single": "key-of-the-single-stream", "other": "key-of-the-other-tenant"}
_PERCENTILES = (50, 90, 99)
_LONGEST_ANSWER_S = 60.0


@dataclass(slots=True)
class Side:
    """What was measured in the rounds with so many streams of the other key.

    Attributes:
        single: answers of the first key.
        num_other_tokens: generated for the other key while the first one's client ran.
    """

    num_streams: int
    single: list[StreamTimes] = field(default_factory=list)
    num_other_tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Times of the first key in ms, and tokens per second of both."""
        ttft_ms = [1e3 * stream.first_token_s for stream in self.single]
        gaps_ms = 1e3 * np.concatenate([np.diff(stream.arrivals_s) for stream in self.single])
        per_token = [stream.per_token_s for stream in self.single]
        tpot_ms = [1e3 * value for value in per_token if value is not None]
        found = {"requests": float(len(self.single))}
        for name, values in (("ttft_ms", ttft_ms), ("tpot_ms", tpot_ms), ("itl_ms", gaps_ms)):
            for share in _PERCENTILES:
                found[f"{name}_p{share}"] = float(np.percentile(values, share))
        num_tokens = sum(stream.output_tokens for stream in self.single)
        found["single_tokens_per_s"] = num_tokens / self.seconds
        found["other_tokens_per_s"] = self.num_other_tokens / self.seconds
        return found


class Flood:
    """Clients of both keys.

    Args:
        port: of the gateway.
        rng: for prompts.
    """

    def __init__(self, port: int, load: Load, rng: random.Random) -> None:
        url = f"http://127.0.0.1:{port}"
        self._targets = {
            name: Target.of(url, "/v1/completions", key) for name, key in _KEYS.items()
        }
        self._load = load
        self._rng = rng

    async def run(self, side: Side, seconds: float) -> None:
        """Run one round; its results are added to ``side``."""
        done = asyncio.Event()
        answers: list[StreamTimes] = []

        async def other() -> None:
            while not done.is_set():
                answers.append(await self._send("other"))

        others = [asyncio.create_task(other()) for _ in range(side.num_streams)]
        try:
            await self._send("single")  # the other key's streams run when it ends
            began_s = time.perf_counter()
            while time.perf_counter() < began_s + seconds:
                side.single.append(await self._send("single"))
            ended_s = time.perf_counter()
            done.set()
            async with asyncio.timeout(_LONGEST_ANSWER_S):
                await asyncio.gather(*others)
        finally:
            for task in others:
                task.cancel()
        side.seconds += ended_s - began_s
        side.num_other_tokens += sum(
            round(_share_within(answer, began_s, ended_s) * answer.output_tokens)
            for answer in answers
        )

    async def _send(self, key: str) -> StreamTimes:
        return read_answer(await ask(self._targets[key], self._load.body(self._rng, 0)))


def _share_within(answer: StreamTimes, began_s: float, ended_s: float) -> float:
    """The share of an answer's pieces that arrived in an interval."""
    within = [began_s <= moment < ended_s for moment in answer.arrivals_s]
    return sum(within) / len(within)


async def measure(args: argparse.Namespace, port: int) -> dict[str, dict[str, float]]:
    """Run all rounds; the figures of both sides.

    Raises:
        StreamFailed: a request failed.
    """
    url = f"http://127.0.0.1:{port}"
    model = await find_model(Target.of(url, "/v1/models", _KEYS["single"]))
    load = Load("completions", model, args.prompt_tokens, args.output_tokens)
    flood = Flood(port, load, random.Random(args.seed))
    await flood.run(Side(args.streams), 0.0)  # warms up
    sides = {"equal": Side(1), "flood": Side(args.streams)}
    for number in range(args.rounds):
        for name, side in sides.items():
            await flood.run(side, args.seconds)
            show(f"round {number + 1}, {name}: {len(side.single)} requests")
    return {name: side.figures() for name, side in sides.items()}


def table(found: dict[str, dict[str, float]]) -> str:
    """The figures in Markdown."""
    equal, flood = found["equal"], found["flood"]
    lines = ["| | two equal tenants | beside a flood | ratio |", "|---|---|---|---|"]
    for name, title in (
        ("ttft_ms_p50", "TTFT p50, ms"),
        ("ttft_ms_p90", "TTFT p90, ms"),
        ("ttft_ms_p99", "TTFT p99, ms"),
        ("tpot_ms_p50", "time per token p50, ms"),
        ("tpot_ms_p99", "time per token p99, ms"),
        ("itl_ms_p99", "between tokens p99, ms"),
        ("single_tokens_per_s", "its tokens/s"),
        ("other_tokens_per_s", "the other key's tokens/s"),
    ):
        ratio = flood[name] / equal[name]
        lines.append(f"| {title} | {equal[name]:.1f} | {flood[name]:.1f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; 1 if a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="as for scripts/serve")
    add("--streams", type=int, default=64, help="of the other key in the flood")
    add("--seconds", type=float, default=8.0, help="of a round")
    add("--rounds", type=int, default=3, help="with one stream of the other key, and with many")
    add("--prompt-tokens", type=int, default=128)
    add("--output-tokens", type=int, default=128)
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="file for all figures")
    args, flags = parser.parse_known_args()
    port = free_port()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        lines = [
            f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"
            for name, key in _KEYS.items()
        ]
        keys.write_text("".join(lines))
        flags += ["--model", args.model, "--api-keys", str(keys)]
        try:
            with serving(Path(folder), port, flags), suppress(KeyboardInterrupt):
                found = uvloop.run(measure(args, port))
        except (NotServed, StreamFailed) as error:
            show(f"failed: {error}")
            return 1
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
