"""Commands that the launcher sends to its own Redis, with short timeouts."""

from collections.abc import Sequence

from deploy.redis.server import Endpoint

_TIMEOUT_S = 1.0


def redis_is_ready(endpoint: Endpoint) -> bool:
    """Whether a Redis has loaded its data and accepts commands."""
    return _ask_redis(endpoint, "PING").startswith(b"+PONG")


def delete_keys(endpoint: Endpoint, keys: Sequence[str]) -> bool:
    """Delete keys; whether the server has confirmed it."""
    return _ask_redis(endpoint, "DEL", *keys).startswith(b":")


def _ask_redis(endpoint: Endpoint, *words: str) -> bytes:
    """The beginning of the reply to one command; empty if there is none."""
    try:
        with endpoint.connect(_TIMEOUT_S) as connection:
            if endpoint.password is not None:
                connection.sendall(_command("AUTH", endpoint.password))
                if not connection.recv(64).startswith(b"+OK"):
                    return b""
            connection.sendall(_command(*words))
            return connection.recv(64)
    except OSError:
        return b""


def _command(*words: str) -> bytes:
    parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
    return f"*{len(words)}\r\n{''.join(parts)}".encode()
