"""What the services take from elsewhere, made a function of the seed; and nothing done twice."""

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from uuid import UUID

import gateway.engine.deliveries
import gpu_worker.plan_reader
import gpu_worker.service
import scheduler_svc.service
import shared.codec
import shared.outputs_log.reader
import tests.simulation.deployment.clients

_DECODERS = (
    shared.codec,
    gpu_worker.plan_reader,
    scheduler_svc.service,
    shared.outputs_log.reader,
)
# The same entry is read by all processes; messages are frozen, so that one object serves all.
_decode_once = lru_cache(maxsize=4_096)(shared.codec.decode)


class _Secrets:
    """Counts instead of drawing."""

    def __init__(self, names: Iterator[int]) -> None:
        self._names = names

    def token_hex(self, _: int) -> str:
        return f"attachment-{next(self._names)}"


@contextmanager
def determined(is_silent: bool) -> Iterator[None]:
    """Names are counted, and nothing is logged unless the log is read."""
    names = itertools.count(1)
    secrets = _Secrets(names)

    def uuid4() -> UUID:
        return UUID(int=next(names))

    replaced: list[tuple[Any, str, Any]] = [
        (scheduler_svc.service, "uuid4", uuid4),
        (gpu_worker.service, "uuid4", uuid4),
        (gateway.engine.deliveries, "secrets", secrets),
        (tests.simulation.deployment.clients, "token_hex", secrets.token_hex),
        *((module, "decode", _decode_once) for module in _DECODERS),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    disabled = logging.root.manager.disable
    if is_silent != (disabled == logging.CRITICAL):  # it makes all loggers forget what they know
        logging.disable(logging.CRITICAL if is_silent else logging.NOTSET)
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        if logging.root.manager.disable != disabled:
            logging.disable(disabled)
