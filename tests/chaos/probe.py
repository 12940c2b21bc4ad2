"""A client that measures response times of gateways: ``python -m tests.chaos.probe``.

It sends cheap requests to each gateway all the time, and asks for a short text now and then. It is
a process of its own, so that no client's work delays it. It prints its results, one line of JSON
each. Times are of the monotonic clock, which all processes of a machine share.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.http_stream import Broken, ask

_HEALTH_EVERY_S = 0.05
_MODELS_EVERY_S = 0.25
_TEXT_EVERY_S = 1.0
_TICK_S = 0.01
_NOTABLE_S = 0.2  # shorter waits are only counted
_LONGEST_S = 60.0
_NUM_TICKS = 12_000  # samples of the control timer to keep: more than the longest wait


@dataclass(frozen=True, slots=True)
class Wait:
    """One request and its result.

    Attributes:
        question: ``live``, ``models`` or ``text``.
        gateway: its index.
        from_s, until_s: when it was sent, and answered or given up.
        ran_s: CPU time of the gateway's main thread meanwhile.
        queued_s: time for which that thread was runnable without a core.
        late_s: delay of this process itself.
        fault: reason if there was no answer, else "".
    """

    question: str
    gateway: int
    from_s: float
    until_s: float
    ran_s: float
    queued_s: float
    late_s: float
    fault: str = ""


class _Control:
    """Measures the delays of this process, which may have to wait for a core as well."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # time and delay

    async def run(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            if now_s - last_s > 3 * _TICK_S:
                self._late.append((now_s, now_s - last_s - _TICK_S))
                del self._late[:-_NUM_TICKS]
            last_s = now_s

    def late_s(self, from_s: float) -> float:
        """Sum of the delays since a time."""
        return sum(late_s for at_s, late_s in self._late if at_s > from_s)


class _Gateway:
    """One gateway and its present process.

    Args:
        pid_file: of its spawner.
    """

    def __init__(self, index: int, port: int, pid_file: Path) -> None:
        self.index = index
        self.port = port
        self._pid_file = pid_file

    def used_s(self) -> tuple[float, float]:
        """Seconds for which its main thread has run, and has waited for a core."""
        try:
            spawner = self._pid_file.read_text().strip()
            pid = Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split()[0]
            ran_ns, queued_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        except (OSError, IndexError):  # it has ended
            return 0.0, 0.0
        return int(ran_ns) / 1e9, int(queued_ns) / 1e9


class Probe:
    """Sends requests until cancelled.

    Args:
        key: the API key.
        report: called with every notable wait, and every first token.
    """

    def __init__(self, gateways: list[_Gateway], key: str, report: Callable[[Wait], None]) -> None:
        self._gateways = gateways
        self._headers = {"Authorization": f"Bearer {key}"}
        self._report = report
        self._control = _Control()
        self.counts: dict[str, int] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._control.run())
            for one in self._gateways:
                tasks.create_task(self._every(one, "live", _HEALTH_EVERY_S, self._live))
                tasks.create_task(self._every(one, "models", _MODELS_EVERY_S, self._models))
                tasks.create_task(self._every(one, "text", _TEXT_EVERY_S, self._first_token))

    async def _every(
        self,
        gateway: _Gateway,
        question: str,
        pause_s: float,
        put: Callable[[_Gateway], Awaitable[str]],
    ) -> None:
        while True:
            used, from_s = gateway.used_s(), time.monotonic()
            try:
                async with asyncio.timeout(_LONGEST_S):
                    fault = await put(gateway)
            except Broken as broken:
                fault = str(broken)
            except TimeoutError:
                fault = f"no answer for {_LONGEST_S:g} s"
            until_s = time.monotonic()
            self.counts[question] = self.counts.get(question, 0) + 1
            if fault or question == "text" or until_s - from_s > _NOTABLE_S:
                # A new process has used less than the one before it.
                pairs = zip(used, gateway.used_s(), strict=True)
                ran_s, queued_s = (max(0.0, now_s - then_s) for then_s, now_s in pairs)
                late_s = self._control.late_s(from_s)
                wait = Wait(
                    question, gateway.index, from_s, until_s, ran_s, queued_s, late_s, fault
                )
                self._report(wait)
            await asyncio.sleep(pause_s)

    async def _live(self, gateway: _Gateway) -> str:
        async with ask(gateway.port, "/health/live") as response:
            await response.body()
            return "" if response.status == 200 else f"status {response.status}"

    async def _models(self, gateway: _Gateway) -> str:
        async with ask(gateway.port, "/v1/models", headers=self._headers) as response:
            await response.body()
            return "" if response.status == 200 else f"status {response.status}"

    async def _first_token(self, gateway: _Gateway) -> str:
        body = {"model": "chaos", "prompt": "My dear", "max_tokens": 1, "stream": True}
        async with ask(gateway.port, "/v1/completions", body, self._headers) as response:
            text = (await response.body()).decode(errors="replace")
        if response.status != 200:
            return f"status {response.status}: {text[:200]}"
        return "" if "[DONE]" in text else f"the stream ended with {text[-200:]!r}"


def _write(wait: Wait) -> None:
    print(json.dumps(asdict(wait)), flush=True)


async def _run(probe: Probe) -> None:
    task = asyncio.ensure_future(probe.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    print(json.dumps({"counts": probe.counts}), flush=True)


def main() -> int:
    """Measure until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.probe", description=__doc__)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--pid-files", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    pairs = zip(options.ports, options.pid_files, strict=True)
    gateways = [_Gateway(index, port, file) for index, (port, file) in enumerate(pairs)]
    asyncio.run(_run(Probe(gateways, os.environ.get("PROBE_KEY", ""), _write)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
