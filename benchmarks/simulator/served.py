"""Runs a real engine on this machine with all its services, and clients for it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.serving.http_stream import Target, ask
from benchmarks.simulator.system import SimRequest
from deploy.redis.ports import free_port
from deploy.settings import REPOSITORY
from shared.errors import PageStreamError

_READY_S = 300.0  # the first start compiles kernels
_STOP_S = 120.0
_POLL_S = 0.1
_VOCABULARY = 4_096  # of the demo model
_FIRST_TOKEN = 8  # those below are special ones


class ServeError(PageStreamError):
    """The services did not start."""


@dataclass(frozen=True, slots=True)
class Served:
    """A client's measurements of a request."""

    id: int
    latency_s: float  # from sending the request to the end of the answer
    num_tokens: int


class Engine:
    """``scripts/serve`` in a folder of its own; a context manager.

    Args:
        folder: for state, logs and the recording.
        flags: of the services.
    """

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self.recording = folder / "recording"
        port = free_port()
        self._target = Target.of(f"http://127.0.0.1:{port}", "/v1/completions", None)
        self._output = folder / "output"
        self._command = [
            *(sys.executable, "-m", "deploy.serve"),
            *("--state-dir", str(folder / "state"), "--port", str(port)),
            *("--scheduler-metrics-port", "0", "--worker-metrics-port", "0"),
            *("--record", str(self.recording)),
            *flags,
        ]

    def __enter__(self) -> "Engine":
        kept = {name: text for name, text in os.environ.items() if name != "REDIS_URL"}
        environ = {k: text for k, text in kept.items() if not k.startswith("PAGESTREAM_")}
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _READY_S
        while "] ready: " not in self._output.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise ServeError(f"the engine did not start:\n{self._output.read_text()}")
            time.sleep(_POLL_S)  # polling interval of the condition
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

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
