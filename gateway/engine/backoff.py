"""Waiting longer each time something fails."""

import asyncio

_FIRST_S = 0.05
_LONGEST_S = 1.0


class Backoff:
    """Pauses between attempts, doubling up to a second."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    async def wait(self) -> None:
        """Pause after a failure."""
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, _LONGEST_S)

    def reset(self) -> None:
        """Something worked."""
        self._next_s = _FIRST_S
