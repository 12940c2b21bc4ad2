"""Finds gateways whose lease has been missing for longer than the grace period."""

import time
from collections.abc import Callable

from shared.bus.api import Bus
from shared.bus.keys import EngineKeys

_LOOK_S = 5.0  # a shorter grace period lasts until the next look but one


class GatewayWatch:
    """Checks the leases of gateways that deliver requests.

    Args:
        grace_s: how long a gateway may be without a lease.
        clock_s: monotonic time.
    """

    def __init__(self, grace_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._clock_s = clock_s
        self._missing_since_s: dict[str, float] = {}
        self._due_s = 0.0

    async def lost(self, bus: Bus, keys: EngineKeys, gateways: Callable[[], set[str]]) -> list[str]:
        """Those of the gateways that were without a lease for all of the grace period.

        Args:
            gateways: that deliver something; to find them takes time with many requests.
        """
        now_s = self._clock_s()
        if now_s < self._due_s:
            return []
        self._due_s = now_s + _LOOK_S
        missing: dict[str, float] = {}
        for gateway in sorted(gateways()):
            if await bus.get(keys.gateway(gateway)) is None:
                missing[gateway] = self._missing_since_s.get(gateway, now_s)
        lost = [name for name, since_s in missing.items() if now_s - since_s >= self._grace_s]
        for name in lost:
            del missing[name]
        self._missing_since_s = missing
        return lost
