"""Damaged messages: valid ones, changed in their structure and in their bytes.

    python -m tests.shared.damage --minutes 5 --seed 1

decodes as many as there is time for; whatever is raised but DecodeError ends it.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from shared.codec import Message, decode, encode
from shared.errors import DecodeError

# Beginnings of values that claim to be long: texts, bytes, lists, maps, extensions, in every width.
CLAIMS: tuple[bytes, ...] = (
    *(b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\x9f", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff"),
    *(b"\x8f", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"),
    *(b"\xc7\xff\x05", b"\xc8\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x00"),
    *(b"\xd6\xff", b"\xd7\xff", b"\xd8\xff", b"\xc1"),
)
_LONGEST_ERROR = 1_000
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**63, 2**64 - 1, -(2**63), float("nan"), float("inf")),
    *("", "x", "5", "Submit", "\ud800", b"", b"\x00", b"\x00" * 7, b"\xff" * 8),
    *([], [[]], [None], {}, {"t": "Stop"}, {"": 0}, [0] * 50, "y" * 300),
    msgpack.ExtType(5, b"abc"),
    msgpack.Timestamp(2**40, 999_999_999),
)


def damaged(message: Message, draw: random.Random) -> bytes:
    """The encoding of a message after up to four changes of each kind."""
    tree = msgpack.unpackb(encode(message))
    for _ in range(draw.randrange(4)):
        tree = _changed(tree, draw)
    raw = bytearray(msgpack.packb(tree, unicode_errors="surrogatepass"))
    for _ in range(draw.randrange(4)):
        _change_bytes(raw, draw)
    return bytes(raw)


def _changed(tree: Any, draw: random.Random) -> Any:
    """One value anywhere in it is another, or more, or less."""
    if isinstance(tree, dict) and tree and draw.random() < 0.9:
        return _changed_map(dict(tree), draw)
    if isinstance(tree, list) and tree and draw.random() < 0.7:
        index = draw.randrange(len(tree))
        return [*tree[:index], _changed(tree[index], draw), *tree[index + 1 :]]
    return draw.choice((_other, _nested, _longer))(tree, draw)


def _changed_map(tree: dict[Any, Any], draw: random.Random) -> dict[Any, Any]:
    key = draw.choice(list(tree))
    kind = draw.randrange(6)
    if kind == 0:
        del tree[key]
    elif kind == 1:
        tree[draw.choice(("t", "v", "extra", "request_id", b"handle", ""))] = draw.choice(_JUNK)
    elif kind == 2:
        tree[key], other = tree[draw.choice(list(tree))], draw.choice(list(tree))
        tree[other] = tree[key]
    else:
        tree[key] = _changed(tree[key], draw)
    return tree


def _other(value: Any, draw: random.Random) -> Any:
    return draw.choice(_JUNK)


def _nested(value: Any, draw: random.Random) -> Any:
    """Inside of more lists and maps than any reader has reason to expect."""
    for level in range(draw.choice((1, 5, 100, 150))):
        value = [value] if level % 2 else {"t": value}
    return value


def _longer(value: Any, draw: random.Random) -> Any:
    if isinstance(value, (str, bytes)):
        return value[:1_000] * draw.choice((2, 3, 200))
    many = 2 if isinstance(value, (list, dict)) else 200
    return [value] * draw.choice((2, many))


def _change_bytes(raw: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(raw) + 1)
    match draw.randrange(5):
        case 0:
            del raw[at:]
        case 1:
            raw[at:at] = draw.choice(CLAIMS)
        case 2:
            raw[at : at + draw.randrange(9)] = b""
        case 3:
            raw[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(9)))
        case _:
            if at < len(raw):
                raw[at] ^= 1 << draw.randrange(8)


def survives(raw: bytes) -> bool:
    """Whether these bytes are a message; then it is the same after another journey.

    Anything but a DecodeError passes through.
    """
    try:
        found = decode(raw)
    except DecodeError as error:
        if len(str(error)) >= _LONGEST_ERROR:
            raise AssertionError("an error says what is wrong, not all that came") from error
        return False
    assert decode(encode(found)) == found
    return True


def main(messages: Sequence[Message]) -> int:
    """Damage and decode until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw, until_s = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    num_tried = num_messages = 0
    slowest_s = 0.0
    while time.monotonic() < until_s:
        raw = damaged(draw.choice(messages), draw)
        began_s = time.perf_counter()
        try:
            num_messages += survives(raw)
        except BaseException:
            print(f"after {num_tried}: {raw!r}", file=sys.stderr)
            raise
        slowest_s = max(slowest_s, time.perf_counter() - began_s)
        num_tried += 1
    print(f"{num_tried} decoded, {num_messages} were messages, slowest {1e3 * slowest_s:.1f} ms")
    return 0


if __name__ == "__main__":
    from tests.shared.test_codec import MESSAGES

    sys.exit(main(MESSAGES))
