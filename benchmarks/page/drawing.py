"""Frames per second and processor time of the page in a headless Chromium."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import httpx

from benchmarks.page.browser import Browser, running_browser
from benchmarks.page.busy_engine import BusyEngine

_STATIC = Path(__file__).parents[2] / "gateway" / "ui" / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html; charset=utf-8"}
_UPDATE_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COUNT_FRAMES = """
window.gaps = []; let last = performance.now();
const tick = now => { window.gaps.push(now - last); last = now; requestAnimationFrame(tick); };
requestAnimationFrame(tick);
"""


class PageServer:
    """Serves the page, and the same frames to whoever looks, ten a second.

    Args:
        texts: a snapshot and the frames that follow; they are sent once.
    """

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        line = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        path = line.partition("?")[0]
        try:
            if path == "/ui/feed":
                await self._feed(writer)
            else:
                writer.write(self._file(path))
                await writer.drain()
        except ConnectionError:
            pass  # the browser has left
        finally:
            writer.close()

    def _file(self, path: str) -> bytes:
        name = "index.html" if path == "/" else path.removeprefix("/ui/")
        file = _STATIC / Path(name).name
        known = {"/ui/engines": b'["engine-0"]', "/ui/past": b"{}", "/v1/models": b'{"data":[]}'}
        if path in known:
            return _head("application/json") + known[path]
        if not file.is_file():
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        return _head(_TYPES[file.suffix]) + file.read_bytes()

    async def _feed(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_head("text/event-stream"))
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for number, text in enumerate(self._texts):
            name = "frame" if number else "snapshot"
            writer.write(f"event: {name}\ndata: {text}\n\n".encode())
            await writer.drain()
            due_s += _UPDATE_S
            await asyncio.sleep(max(0.0, due_s - loop.time()))
        await asyncio.sleep(60)


def _head(kind: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode()


async def measure(
    num_blocks: int, num_sequences: int, seconds: float, folder: Path
) -> dict[str, float]:
    """Show a busy pool for some seconds.

    Raises:
        NoBrowser: there is no Chromium.
    """
    engine = BusyEngine(num_blocks, num_sequences)
    texts = list(engine.frames(int((seconds + 4) / _UPDATE_S)))
    server = await asyncio.start_server(PageServer(texts).answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, _browser(folder) as browser:
        await browser.resize(1_600, 1_000)
        await browser.open(f"http://127.0.0.1:{port}/#/engine")
        await browser.until("return document.getElementById('engine').dataset.frames > 5")
        before_s, began_s = _cpu_s(folder), time.perf_counter()
        shown = int(await browser.run("return document.getElementById('engine').dataset.frames"))
        await browser.run(_COUNT_FRAMES)
        await asyncio.sleep(seconds)
        gaps = await browser.run("return window.gaps.slice(2)")
        updates = await browser.run("return document.getElementById('engine').dataset.frames")
        took_s = time.perf_counter() - began_s
        cpu_s = _cpu_s(folder) - before_s
        assert await browser.errors() == []
    return {
        "frames_per_s": len(gaps) / (sum(gaps) / 1e3),
        "longest_gap_ms": max(gaps),
        "late_frames": sum(gap > 25 for gap in gaps) / len(gaps),  # more than one was left out
        "updates_per_s": (int(updates) - shown) / took_s,
        "browser_cpus": cpu_s / took_s,
        "snapshot_kib": len(texts[0]) / 1024,
        "frame_kib": median(map(len, texts[1:])) / 1024,
        "reader_ms_per_frame": median(engine.costs.frames),
    }


@asynccontextmanager
async def _browser(folder: Path) -> AsyncIterator[Browser]:
    with running_browser(folder) as session:
        async with httpx.AsyncClient(base_url=session, timeout=60, trust_env=False) as http:
            yield Browser(http)


def _cpu_s(folder: Path) -> float:
    """Processor time of the browser's processes so far."""
    ticks = 0
    for process in Path("/proc").iterdir():
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:
            continue  # it has ended
    return ticks / _TICKS_PER_S


def table(found: dict[str, dict[str, float]]) -> str:
    """The figures in Markdown."""
    titles = {
        "frames_per_s": "frames per second",
        "late_frames": "share of frames that came late",
        "longest_gap_ms": "longest time between two, ms",
        "updates_per_s": "updates per second",
        "browser_cpus": "CPUs that the browser keeps busy",
        "frame_kib": "an update, KiB",
        "snapshot_kib": "a snapshot, KiB",
        "reader_ms_per_frame": "the reader's time for an update of 10 steps, ms",
    }
    lines = ["| | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for name, title in titles.items():
        values = " | ".join(f"{figures[name]:.3g}" for figures in found.values())
        lines.append(f"| {title} | {values} |")
    return "\n".join(lines)
