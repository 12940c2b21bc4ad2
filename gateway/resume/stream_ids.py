"""Ids of streams that can be resumed.

A call's id is derived from a secret and the client's name; the URL of its stream holds the secret.
The same URL with another client's name leads to another call id, which does not exist. So a client
cannot read or take over the stream of another one, or find out that it exists. The URL also holds a
checksum of both, so that such calls are refused without asking the engine.
"""

import hashlib
import hmac
import re

_SECRET_CHARS = 32
_STREAM_ID = re.compile(r"[0-9a-f]{48}")


def secret_of_key(key: str) -> str:
    """The secret of all calls with this ``Idempotency-Key``: 128 bits in hex."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"key").hexdigest()


def call_id_of(secret: str, client: str) -> str:
    """Id of a call: 128 bits in hex, from which its secret cannot be found.

    Args:
        secret: 128 bits in hex.
        client: name of the caller, "" for none; other names lead to other ids.
    """
    return _derived(secret, client, b"call", 16)


def stream_id_of(secret: str, client: str) -> str:
    """The id in the URL at which this client continues the stream."""
    return secret + _derived(secret, client, b"check", 8)


def call_id_in(stream_id: str, client: str) -> str | None:
    """Id of the call whose stream this is, None if it is not this client's."""
    if _STREAM_ID.fullmatch(stream_id) is None:
        return None
    secret = stream_id[:_SECRET_CHARS]
    if not hmac.compare_digest(stream_id, stream_id_of(secret, client)):
        return None
    return call_id_of(secret, client)


def _derived(secret: str, client: str, purpose: bytes, num_bytes: int) -> str:
    key, data = bytes.fromhex(secret), client.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=num_bytes, key=key, person=purpose).hexdigest()
