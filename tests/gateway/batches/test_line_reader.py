"""Lines of a file in pieces, from any of them on."""

import time
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.line_reader import read_lines
from gateway.batches.progress import LineProgress
from gateway.batches.records import START_OF_FILE, Progress
from gateway.files.records import FilePiece
from gateway.files.store import FileStore
from shared.bus.api import Append
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from shared.codec import encode

MAX_LINE_BYTES = 6


async def kept(data: bytes, cuts: list[int]) -> FileStore:
    """A file in pieces that end at these places."""
    bus = MemoryBus(lambda: time.time_ns() // 1_000_000)
    files = FileStore(bus, EngineKeys("e"), 3_600, 10_000, 10_000)
    places = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    pieces = [data[a:b] for a, b in pairwise(places)]
    for number, piece in enumerate(pieces, 1):
        message = encode(FilePiece(piece))
        await bus.append(Append(files.keys.file_pieces("f"), [message], 1, number))
    return files


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"\n", b"\r", b"a", b"bcd", b"\xef\xbb\xbf"]), max_size=40).map(
        b"".join
    ),
    cuts=st.lists(st.integers(1, 60), max_size=6),
)
async def test_lines_are_those_of_the_text_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    files = await kept(data, cuts)
    lines = [line async for line in read_lines(files, "f", START_OF_FILE, MAX_LINE_BYTES)]
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert len(lines) == len(expected)
    for number, (line, text) in enumerate(zip(lines, expected, strict=True)):
        assert line.number == number
        if len(text) > MAX_LINE_BYTES:
            assert line.data is None
        else:
            assert line.data == (text.removeprefix(b"\xef\xbb\xbf") if number == 0 else text)
        start = Progress(line.number, line.piece, line.offset, np.empty(0, np.int32))
        rest = [later async for later in read_lines(files, "f", start, MAX_LINE_BYTES)]
        assert rest == lines[number:]


@settings(max_examples=150, deadline=None)
@given(order=st.permutations(range(12)), num_done=st.integers(0, 12), num_read=st.integers(0, 12))
async def test_progress_goes_on_with_exactly_the_lines_that_are_not_done(
    order: list[int], num_done: int, num_read: int
) -> None:
    files = await kept(b"".join(b"%d\n" % number for number in range(12)), [5, 6, 13])
    lines = [line async for line in read_lines(files, "f", START_OF_FILE, 10)]
    progress, done = LineProgress(START_OF_FILE), set()
    for line in lines[:num_read]:
        progress.read(line)
    for number in order[:num_done]:
        if number < num_read:
            progress.finish(number)
            done.add(number)
    written = progress.snapshot()
    later = LineProgress(written)
    left = []
    async for line in read_lines(files, "f", written, 10):
        later.read(line)
        if not later.is_done(line.number):
            left.append(line)
    assert left == [line for line in lines if line.number not in done]
