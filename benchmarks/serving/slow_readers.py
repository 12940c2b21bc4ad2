"""Measures what idle connections and slow readers cost other clients.

    python -m benchmarks.serving.slow_readers [--idle 2000] [--slow 500] [--json FILE]

Starts all services with ``scripts/serve``. A few clients send one request after the other: alone,
beside idle connections that have sent one request, beside these and streams that read a few hundred
bytes a second, and alone again. The slow readers' answers are complete before the measurement, so
that they take no engine time, and are kept in the gateway and in sockets. In the end each slow
reader reads the rest, and must get the whole answer.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.progress import show
from benchmarks.serving.http_stream import StreamFailed, Target, ask
from benchmarks.serving.latencies import read_answer, summarize
from benchmarks.serving.launched_services import service_pids, serving
from benchmarks.serving.load import Load
from benchmarks.serving.processes import held_by
from benchmarks.serving.server_process import NotServed
from deploy.redis.ports import free_port

_LOAD = Load("completions", "demo", prompt_tokens=32, output_tokens=32)
_SHOWN = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "latency_ms_p50")
_AT_ONCE = 100  # connections that are opened at a time
_RECEIVE_BUFFER_BYTES = 4_096  # so that the server has to keep the rest
_SLOW_READ_BYTES = 512
_SLOW_READ_S = 1.0
_IDLE_FACTOR = 2.0  # times the usual latency; the engine is otherwise idle then
_IDLE_DEADLINE_S = 600.0


class SlowReader:
    """A stream that is read slowly."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._socket.setblocking(False)
        self._end = b""

    async def open(self, target: Target, request: bytes) -> None:
        """Send the request and read the first bytes."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, (target.host, target.port))
        await loop.sock_sendall(self._socket, request)
        await self._read_piece()

    async def read_slowly(self) -> None:
        """Read slowly until cancelled, or until the answer ends."""
        while True:
            if not await self._read_piece():
                return
            await asyncio.sleep(_SLOW_READ_S)

    async def read_rest(self) -> bool:
        """Read the rest; whether the answer is complete."""
        while await self._read_piece(1 << 20):
            pass
        return b"[DONE]" in self._end

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    async def _read_piece(self, num_bytes: int = _SLOW_READ_BYTES) -> int:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)
        except OSError:
            data = b""
        self._end = (self._end + data)[-64:]
        return len(data)


class Connections:
    """The measured clients, the idle connections and the slow readers.

    Args:
        port: of the gateway.
        rng: of prompts.
    """

    def __init__(self, port: int, rng: random.Random) -> None:
        self._target = Target.of(f"http://127.0.0.1:{port}", "/v1/completions", None)
        self._probe = Target.of(f"http://127.0.0.1:{port}", "/v1/models", None)
        self._rng = rng
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.slow: list[SlowReader] = []

    async def measure(self, num_clients: int, seconds: float) -> dict[str, float]:
        """Figures of clients that each send one request after the other."""
        until_s = time.monotonic() + seconds

        async def client() -> list[Any]:
            answers = []
            while time.monotonic() < until_s:
                answers.append(await ask(self._target, _LOAD.body(self._rng, 0)))
            return answers

        cpu_s = time.process_time()
        found = await asyncio.gather(*(client() for _ in range(num_clients)))
        cpu_s = time.process_time() - cpu_s
        return summarize([read_answer(answer) for own in found for answer in own], cpu_s)

    async def open_idle(self, num_idle: int) -> None:
        """Open connections that request the model list once and stay open."""
        request = self._probe.request(None).replace(b"Connection: close\r\n", b"")
        for first in range(0, num_idle, _AT_ONCE):
            count = min(_AT_ONCE, num_idle - first)
            self._idle += await asyncio.gather(*(self._keep(request) for _ in range(count)))

    async def _keep(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._probe.host, self._probe.port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if b" 200 " not in head.split(b"\r\n")[0] or length is None:
            raise StreamFailed(f"an idle connection got {head[:80]!r}")
        await reader.readexactly(int(length[1]))
        return reader, writer

    def num_idle(self) -> int:
        """Number of connections that are still open."""
        return sum(not reader.at_eof() for reader, _ in self._idle)

    def close_idle(self) -> None:
        """Close all idle connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle = []

    async def start_slow(self, count: int, output_tokens: int) -> None:
        """Start streams and read only their beginnings."""
        load = Load("completions", "demo", prompt_tokens=32, output_tokens=output_tokens)
        self.slow = [SlowReader() for _ in range(count)]
        for first in range(0, count, _AT_ONCE):
            await asyncio.gather(
                *(
                    reader.open(self._target, self._target.request(load.body(self._rng, 0)))
                    for reader in self.slow[first : first + _AT_ONCE]
                )
            )

    async def wait_until_idle(self, usual_ms: float) -> None:
        """Wait until a request takes about as long as it did alone.

        Raises:
            StreamFailed: it never does.
        """
        until_s = time.monotonic() + _IDLE_DEADLINE_S
        while time.monotonic() < until_s:
            answer = read_answer(await ask(self._target, _LOAD.body(self._rng, 0)))
            if 1_000 * answer.latency_s < _IDLE_FACTOR * usual_ms:
                return
            await asyncio.sleep(1.0)  # each try is a request, and a load itself
        raise StreamFailed(f"the engine was not done with slow readers in {_IDLE_DEADLINE_S:g} s")


async def measure(args: argparse.Namespace, port: int, folder: Path) -> dict[str, Any]:
    """Run all phases; the results as one object."""
    connections = Connections(port, random.Random(args.seed))
    gateway = service_pids(folder)["gateway"]
    phases: list[dict[str, Any]] = []

    async def phase(name: str) -> None:
        figures = await connections.measure(args.clients, args.seconds)
        rss_mib = held_by(gateway).rss_bytes / 2**20
        phases.append({"name": name, "gateway_mib": rss_mib, **figures})
        show(f"{name}: {figures['requests']:.0f} requests, gateway {rss_mib:.0f} MiB")

    await connections.measure(args.clients, 3.0)  # warms up
    await phase("alone")
    await connections.start_slow(args.slow, args.slow_tokens)
    show(f"{args.slow} slow readers ask for {args.slow_tokens} tokens each")
    slow_reads = [asyncio.create_task(reader.read_slowly()) for reader in connections.slow]
    # The latency of a single client is lower than that of all together.
    await connections.wait_until_idle(phases[0]["latency_ms_p50"])
    await phase("slow readers")
    await connections.open_idle(args.idle)
    await phase("slow readers and idle connections")
    num_idle = connections.num_idle()
    connections.close_idle()
    for task in slow_reads:
        task.cancel()
    await asyncio.gather(*slow_reads, return_exceptions=True)
    whole = await asyncio.gather(*(reader.read_rest() for reader in connections.slow))
    for reader in connections.slow:
        reader.close()
    await connections.open_idle(args.idle)
    await phase("idle connections")
    num_idle = min(num_idle, connections.num_idle())
    connections.close_idle()
    await phase("alone again")
    return {"phases": phases, "idle": num_idle, "slow_whole": sum(whole)}


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    names = ("requests", "output_tokens_per_s", *_SHOWN, "gateway_mib")
    lines = ["| beside | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for phase in found["phases"]:
        cells = [f"{phase[name]:.1f}" for name in names]
        lines.append(f"| {phase['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def faults(found: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """What is not as required, in sentences."""
    lines = []
    if found["idle"] < args.idle:
        lines.append(f"{args.idle - found['idle']} idle connections were closed")
    if found["slow_whole"] < args.slow:
        lines.append(f"{args.slow - found['slow_whole']} slow readers lack the end of their answer")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a client did not get its whole answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--idle", type=int, default=2_000, help="connections that are open and unused")
    add("--slow", type=int, default=500, help="streams that are read slowly")
    add("--slow-tokens", type=int, default=512, help="of each of these")
    add("--clients", type=int, default=8, help="that are measured")
    add("--seconds", type=float, default=30.0, help="of each phase")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="file for all figures")
    args = parser.parse_args(argv)
    flags = ["--max-waiting-requests", str(args.slow + args.clients)]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with serving(Path(folder), port, flags):
                found = uvloop.run(measure(args, port, Path(folder)))
        except (NotServed, StreamFailed) as error:
            show(f"failed: {error}")
            return 1
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    lines = faults(found, args)
    for line in lines:
        show(f"found: {line}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
