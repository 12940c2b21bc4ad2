"""Messages in a log of a fleet's directory, from gateways to gateways: Routed."""

from dataclasses import dataclass

import numpy as np

from shared.codec import Message, message
from shared.errors import DecodeError

_HASH_BYTES = 8


@message
@dataclass(frozen=True, slots=True, eq=False)
class Routed(Message):
    """A gateway sent a prompt to an engine."""

    gateway: str  # a name that it drew at its start
    engine: str
    prefixes: bytes  # hashes of the prompt's beginnings, shortest first, 8 bytes each
    num_new_tokens: int  # of the prompt, which the engine probably has to compute


def pack_hashes(hashes: list[int]) -> bytes:
    """Hashes of 8 bytes each, as they stand in a message."""
    return np.array(hashes, "<u8").tobytes()


def unpack_hashes(data: bytes) -> list[int]:
    """The hashes that ``pack_hashes`` wrote.

    Raises:
        DecodeError: the bytes are not a whole number of hashes.
    """
    if len(data) % _HASH_BYTES:
        raise DecodeError(f"{len(data)} bytes are not a whole number of hashes")
    found: list[int] = np.frombuffer(data, "<u8").tolist()
    return found
