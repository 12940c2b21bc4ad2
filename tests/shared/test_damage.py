"""Whatever stands in a log, reading it raises nothing but DecodeError, and costs little."""

import random
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import Message, decode, encode
from shared.errors import DecodeError
from shared.messages import leases, outputs, plans, prompts, requests, routes, snapshots
from tests.shared.damage import CLAIMS, damaged, survives
from tests.shared.test_codec import MESSAGES

_PER_BYTE = 1_000  # of what is decoded, that decoding may take for a moment
_ANYWAY = 200_000


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@settings(max_examples=200, derandomize=True, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_a_damaged_message_is_a_decode_error_or_another_message(
    message: Message, draw: random.Random
) -> None:
    survives(damaged(message, draw))


def test_every_type_of_message_is_damaged() -> None:
    known = {
        found
        for module in (leases, outputs, plans, prompts, requests, routes, snapshots)
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, Message) and found is not Message
    }
    assert {type(message) for message in MESSAGES} == known


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.hex())
def test_what_claims_to_be_long_takes_no_memory(claim: bytes) -> None:
    small = encode(MESSAGES[2])
    hostile = [claim * (200 // len(claim)), claim + small, small[:-1] + claim]
    hostile += [small.replace(b"\xa1a", claim, 1), b"\x81\xa1t" + claim * 40]
    for raw in hostile:
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError):
                decode(raw)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < _ANYWAY + _PER_BYTE * len(raw), (raw[:40], peak_bytes)


@pytest.mark.parametrize("depth", [10, 500, 5_000, 100_000])
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1t"])
def test_what_is_nested_too_deep_is_a_decode_error(depth: int, head: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(head * depth + b"\xc0")


def test_an_error_does_not_repeat_all_that_came() -> None:
    for raw in (
        encode(MESSAGES[2]).replace(b"\xa4Stop", b"\xda\x40\x00" + b"x" * 0x4000),
        b"\x82\xa1t\xa4Stop\xa1v\xda\x40\x00" + b"x" * 0x4000,
        msgpack.packb({"t": "Stop", "v": 1, "request_id": "a", "choice": "x" * 0x4000}),
    ):
        with pytest.raises(DecodeError) as caught:
            decode(raw)
        assert len(str(caught.value)) < 1_000
