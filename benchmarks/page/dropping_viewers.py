"""Viewers that cost next to nothing: sockets whose bytes are dropped, at the lowest priority.

    python -m benchmarks.page.dropping_viewers PORT

Reads numbers of viewers, one a line, from the standard input: so many feeds are open from then on.
Before each change it writes how many bytes came since the one before. Sockets are
emptied four times a second, so that this process wakes up seldom.
"""

import os
import select
import socket
import sys

_EVERY_S = 0.25
_REQUEST = b"GET /ui/feed HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_MOST_BYTES = 1 << 20  # of one read


def main() -> None:
    """Look until the standard input ends."""
    os.nice(19)
    address = ("127.0.0.1", int(sys.argv[1]))
    viewers: list[socket.socket] = []
    buffer = bytearray(_MOST_BYTES)
    num_bytes = 0
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], _EVERY_S)
        num_bytes += sum(_drop(viewer, buffer) for viewer in viewers)
        if not ready:
            continue
        line = sys.stdin.readline()
        print(num_bytes, flush=True)
        num_bytes = 0
        for viewer in viewers:
            viewer.close()
        if not line:
            return
        viewers = [_open(address) for _ in range(int(line))]


def _open(address: tuple[str, int]) -> socket.socket:
    viewer = socket.create_connection(address)
    viewer.sendall(_REQUEST)
    viewer.setblocking(False)
    return viewer


def _drop(viewer: socket.socket, buffer: bytearray) -> int:
    """Read all that has come; the number of bytes."""
    num_bytes = 0
    try:
        while found := viewer.recv_into(buffer):
            num_bytes += found
    except BlockingIOError:
        pass
    return num_bytes


if __name__ == "__main__":
    main()
