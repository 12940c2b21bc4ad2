"""Measures what a streamed token costs the gateway: its CPU time, and where it is spent.

    python -m benchmarks.micro.gateway_tokens [--streams 16] [--profile]

The real gateway runs on an in-memory bus, with an engine that publishes made-up tokens at a fixed
pace, and with ``benchmarks.serving.load`` as another process. Time is that of the gateway's thread,
engine included; ``--profile`` shows the engine's share.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
import time

import numpy as np
import uvloop

from benchmarks.micro.plain_result import plain_result
from gateway.http.server import Server
from gateway.models.model_files import ModelFiles
from gateway.settings import GatewaySettings
from gateway.text.tokenizer import Tokenizer
from shared.bus.api import START, Append
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from shared.codec import IntArray, Message, decode, encode
from shared.messages.leases import PROTOCOL, EngineInfo, EngineState, KVGeometry, ModelInfo
from shared.messages.outputs import ChoiceState, RequestState
from shared.messages.plans import EpochStarted
from shared.messages.requests import Submit

_MODEL = "models/demo"
_ENGINE = "engine-0"
_EPOCH = 1
_NONE: IntArray = np.empty(0, np.int32)


class PacedEngine:
    """Publishes a token of every stream in every step."""

    def __init__(self, bus: MemoryBus, num_tokens: int, step_s: float) -> None:
        self._bus = bus
        self._keys = EngineKeys(_ENGINE)
        self._num_tokens = num_tokens
        self._step_s = step_s
        self._step = 0

    async def publish(self) -> None:
        """Publish the engine's state as ready."""
        info = EngineInfo(
            engine_id=_ENGINE,
            scheduler="paced",
            epoch=_EPOCH,
            state=EngineState.READY,
            detail="",
            model=ModelInfo("demo", 4_096, 2_048, "none", ()),
            kv=KVGeometry(100_000, 16, 1, 0),
            max_num_sequences=4_096,
            num_running=0,
            num_waiting=0,
            protocol=PROTOCOL,
        )
        await self._bus.put(self._keys.info, encode(info), 3_600_000)
        await self._publish_tokens(EpochStarted(_EPOCH, "paced", ("worker",)))

    async def serve(self, num_streams: int) -> None:
        """Wait for so many requests, and publish all their tokens."""
        submits: list[Submit] = []
        cursor = START
        while len(submits) < num_streams:
            found = await self._bus.read({self._keys.requests: cursor}, 1_000, 1_000)
            for entry in found.get(self._keys.requests, ()):
                cursor = entry.id
                read = map(decode, entry.messages)
                submits += [message for message in read if isinstance(message, Submit)]
        for handle, submit in enumerate(submits):
            await self._publish_tokens(
                RequestState(submit, (ChoiceState(0, handle, _NONE, ""),), "0-0")
            )
        handles = np.arange(num_streams, dtype=np.int32)
        for number in range(self._num_tokens):
            await asyncio.sleep(self._step_s)  # the step itself
            self._step += 1
            ended = handles if number == self._num_tokens - 1 else _NONE
            await self._publish_tokens(plain_result(self._step, handles, 300 + number, ended))

    async def _publish_tokens(self, message: Message) -> None:
        await self._bus.append(Append(self._keys.outputs, [encode(message)], _EPOCH))


async def measure(num_streams: int, num_tokens: int, step_s: float, profile: bool) -> float:
    """Microseconds of CPU time per token, from the first request to the end of the last."""
    bus = MemoryBus(lambda: time.monotonic_ns() // 1_000_000)
    tokenizer = Tokenizer.load(_MODEL, trust_remote_code=False)
    settings = GatewaySettings(model=_MODEL, port=0, log_level="error")
    engine = PacedEngine(bus, num_tokens, step_s)
    await engine.publish()
    server = Server(settings, bus, ModelFiles.of("demo", _MODEL, tokenizer, settings))
    running = asyncio.create_task(server.run())
    url = f"http://127.0.0.1:{await server.listening()}"
    while server.service.why_not_ready() is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.1)  # polling interval of the condition
    command = [sys.executable, "-m", "benchmarks.serving.load", "--base-url", url, "--warmup", "0"]
    command += ["--runs", "1", "--concurrency", str(num_streams), "--model", "demo"]
    command += ["--output-tokens", str(num_tokens)]
    serving = asyncio.create_task(engine.serve(num_streams))
    null = asyncio.subprocess.DEVNULL
    load = await asyncio.create_subprocess_exec(*command, stdout=null)
    profiler = cProfile.Profile(time.thread_time) if profile else None
    if profiler is not None:
        profiler.enable()
    began_s = time.thread_time()
    await serving
    await load.wait()
    spent_s = time.thread_time() - began_s
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    server.stop()
    await running
    return 1e6 * spent_s / (num_streams * num_tokens)


def main() -> None:
    """Measure and print microseconds, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0, help="between two tokens")
    parser.add_argument("--profile", action="store_true", help="show functions by their own time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = uvloop.run(measure(args.streams, args.tokens, args.step_ms / 1e3, args.profile))
    if args.json:
        print(json.dumps({"streams": args.streams, "us_per_token": found}))
    else:
        print(f"{args.streams} streams: {found:.1f} us of the gateway's core per token")


if __name__ == "__main__":
    main()
