"""What the page costs: in the browser, and the server that it looks at.

    python -m benchmarks.page [drawing] [viewers] [--blocks 4096 100000] [--model demo] [--rounds 7]

*drawing*: a headless Chromium shows a pool in which much happens, at ten updates a second.
*viewers*: tokens per second of a server with one and five open feeds and with none, in turns, and
the processor time of its services.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks.page import drawing, viewers
from benchmarks.page.browser import NoBrowser
from benchmarks.serving.http_stream import StreamFailed
from benchmarks.serving.launched_services import serving
from benchmarks.serving.server_process import NotServed
from deploy.redis.ports import free_port

_SEQUENCES = {4_096: 64}  # others have 256


def main() -> int:
    """Measure and print; 1 if a server or the browser cannot be started."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("parts", nargs="*", default=["drawing", "viewers"], help="drawing, viewers")
    add("--blocks", type=int, nargs="+", default=[4_096, 100_000])
    add("--model", default="demo", help="as for scripts/serve")
    add("--streams", type=int, default=16)
    add("--viewers", type=int, nargs="+", default=[1, 5])
    add("--rounds", type=int, default=7, help="windows of each number of viewers")
    add("--seconds", type=float, default=4.0, help="of a window, and of drawing")
    args, flags = parser.parse_known_args()
    try:
        if "drawing" in args.parts:
            print(drawing.table(_drawn(args)), flush=True)
        if "viewers" in args.parts:
            print(viewers.table(_looked_at(args, flags)), flush=True)
    except (NoBrowser, NotServed, StreamFailed) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def _drawn(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found = {}
    for num_blocks in args.blocks:
        with tempfile.TemporaryDirectory() as folder:
            num_sequences = _SEQUENCES.get(num_blocks, 256)
            work = drawing.measure(num_blocks, num_sequences, args.seconds, Path(folder))
            found[f"{num_blocks:,} blocks"] = uvloop.run(work)
    return found


def _looked_at(args: argparse.Namespace, flags: list[str]) -> viewers.Measured:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--model", args.model, "--num-blocks", "4096"]
        with serving(Path(folder), port, flags):
            return uvloop.run(
                viewers.measure(
                    *(port, Path(folder), args.streams),
                    *(args.viewers, args.rounds, args.seconds),
                )
            )


if __name__ == "__main__":
    sys.exit(main())
