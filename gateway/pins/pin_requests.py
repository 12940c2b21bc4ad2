"""Sends pins to the scheduler: prefixes that the operator wants to stay in the KV cache.

Every gateway sends its prefixes to every epoch of the engine until the engine's lease lists them.
A prefix that the lease does not list, or no longer, is sent again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shared.codec import IntArray
from shared.logs import EventLog
from shared.messages.leases import EngineInfo, PrefixState
from shared.messages.requests import Pin

_AGAIN_S = 30.0
_MAX_AT_ONCE = 16  # an entry of the log should stay small
_ID_BYTES = 16

_log = EventLog("gateway.pins.pin_requests")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of prompts."""

    name: str
    tokens: IntArray  # [num_tokens]
    cache_salt: str

    @property
    def prefix_id(self) -> str:
        """The same in every gateway that has the same tokens and salt."""
        digest = blake2b(self.cache_salt.encode(), digest_size=_ID_BYTES, person=b"prefix")
        digest.update(b"\0" + self.tokens.astype("<i4").tobytes())
        return digest.hexdigest()


class Pinning:
    """Decides which prefixes are sent to the engine, and when.

    Attributes:
        prefixes: in the operator's order.
    """

    def __init__(self, prefixes: Sequence[Prefix]) -> None:
        self.prefixes = tuple(prefixes)
        self._by_id = {prefix.prefix_id: prefix for prefix in prefixes}
        self._unsupported: set[str] = set()  # with tokens outside the vocabulary
        self._epoch = 0
        self._states: dict[str, str] = {}
        self._sent_s: dict[str, float] = {}  # in this epoch

    def due(self, info: EngineInfo, now_s: float) -> list[Pin]:
        """Messages to send to a ready engine now.

        Args:
            now_s: of a monotonic clock.
        """
        if not self._by_id:
            return []
        if info.epoch != self._epoch:
            self._epoch = info.epoch
            self._sent_s.clear()
        self._states = {status.prefix_id: status.state for status in info.prefixes}
        pins: list[Pin] = []
        for prefix_id, prefix in self._by_id.items():
            again = now_s - self._sent_s.get(prefix_id, -math.inf) >= _AGAIN_S
            if again and prefix_id not in self._states and self._is_for(info, prefix_id):
                self._sent_s[prefix_id] = now_s
                pins.append(Pin(prefix_id, prefix.name, prefix.tokens, prefix.cache_salt))
                if len(pins) == _MAX_AT_ONCE:
                    break
        return pins

    def state_of(self, prefix: Prefix) -> str:
        """The state of a prefix, by the engine's last lease."""
        if prefix.prefix_id in self._unsupported:
            return PrefixState.REFUSED
        return self._states.get(prefix.prefix_id, PrefixState.PENDING)

    def _is_for(self, info: EngineInfo, prefix_id: str) -> bool:
        """Whether all tokens are in the model's vocabulary."""
        assert info.model is not None, "the lease of a ready engine has a model"
        if prefix_id in self._unsupported:
            return False
        prefix = self._by_id[prefix_id]
        size, largest = info.model.vocab_size, int(prefix.tokens.max())
        if largest >= size:
            self._unsupported.add(prefix_id)
            reason = f"token {largest}: the vocabulary has the tokens 0 to {size - 1}"
            _log.error("cannot pin prefix", name=prefix.name, reason=reason)
            return False
        return True
