"""Runs a real engine on this machine with all its services, and clients for it."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.http_stream import Target, ask
from benchmarks.serving.launched_services import serving
from benchmarks.simulator.system import SimRequest
from deploy.redis.ports import free_port

_VOCABULARY = 4_096  # of the demo model
_FIRST_TOKEN = 8  # those below are special ones


@dataclass(frozen=True, slots=True)
class Served:
    """A client's measurements of a request."""

    id: int
    latency_s: float  # from sending the request to the end of the answer
    num_tokens: int


class Engine:
    """Clients of an engine.

    Args:
        port: of its gateway.
        recording: the file that its scheduler writes.
    """

    def __init__(self, port: int, recording: Path) -> None:
        self.recording = recording
        self._target = Target.of(f"http://127.0.0.1:{port}", "/v1/completions", None)

    def serve(self, requests: Sequence[SimRequest]) -> list[Served]:
        """Send requests at their arrival times, and wait for all answers.

        Raises:
            StreamFailed: a request was not answered.
        """
        return asyncio.run(self._serve(requests))

    async def _serve(self, requests: Sequence[SimRequest]) -> list[Served]:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(self._ask(request, began)) for request in requests]
        return [task.result() for task in sent]

    async def _ask(self, request: SimRequest, began: float) -> Served:
        await asyncio.sleep(max(0.0, began + request.arrival_s - time.monotonic()))
        body = {
            "model": "demo",
            "prompt": _prompt(request),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": request.id,
        }
        answer = await ask(self._target, body)
        num_tokens = json.loads(answer.body)["usage"]["completion_tokens"]
        return Served(request.id, answer.ended_s - answer.sent_s, num_tokens)


def _prompt(request: SimRequest) -> list[int]:
    """Token ids of which no other request has the same beginning."""
    span = _VOCABULARY - _FIRST_TOKEN
    begin = [_FIRST_TOKEN + request.id % span, _FIRST_TOKEN + request.id // span]
    return (begin + [_FIRST_TOKEN + 1] * request.prompt_tokens)[: request.prompt_tokens]


@contextmanager
def running_engine(folder: Path, flags: Sequence[str]) -> Iterator[Engine]:
    """Run ``scripts/serve`` inside the block.

    Args:
        folder: for state, logs and the recording.
        flags: of the services.

    Raises:
        NotServed: the services do not become ready.
    """
    port, recording = free_port(), folder / "recording"
    with serving(folder, port, ["--record", str(recording), *flags]):
        yield Engine(port, recording)
