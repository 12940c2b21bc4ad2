"""Slow readers, and the faults that are reported about them."""

import asyncio
from argparse import Namespace

import pytest

from benchmarks.serving.http_stream import Target
from benchmarks.serving.slow_readers import SlowReader, faults


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"data: cut"])
async def test_a_slow_reader_detects_whether_it_got_the_whole_answer(end: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"data: x\n\n" * 100_000 + end)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = Target.of(f"http://127.0.0.1:{port}", "/", None)
        reader = SlowReader()
        await reader.open(target, target.request(None))
        assert await reader.read_rest() == end.endswith(b"[DONE]\n\n")
        reader.close()


def test_clients_without_a_whole_answer_are_reported() -> None:
    args = Namespace(idle=10, slow=5)
    assert faults({"idle": 10, "slow_whole": 5}, args) == []
    assert faults({"idle": 8, "slow_whole": 4}, args) == [
        "2 idle connections were closed",
        "1 slow readers lack the end of their answer",
    ]
