"""The uses of the KV memory over the time of a run: integrals, not samples.

An engine's memory changes only when an iteration starts and when a request arrives.
"""

from collections.abc import Sequence

from benchmarks.simulator.system import MemoryUse, System


class HeldMemory:
    """Token slots times seconds, of all engines.

    Args:
        systems: one per engine; the run begins now, at 0 s.
    """

    def __init__(self, systems: Sequence[System]) -> None:
        self._uses = [system.memory() for system in systems]
        self._since_s = [0.0] * len(systems)
        self._token_states = 0.0
        self._reserved = 0.0
        self._internal = 0.0
        self._external = 0.0
        self._free = 0.0
        self._shared = 0.0

    def changes(self, engine: int, now_s: float, use: MemoryUse) -> None:
        """Record an engine's use of memory from now on."""
        before = self._uses[engine]
        spent_s = now_s - self._since_s[engine]
        self._token_states += spent_s * before.token_states
        self._reserved += spent_s * before.reserved
        self._internal += spent_s * before.internal
        self._external += spent_s * before.external
        self._free += spent_s * before.free
        self._shared += spent_s * before.shared
        self._uses[engine] = use
        self._since_s[engine] = now_s

    def close(self, end_s: float) -> None:
        """End the run."""
        for engine, use in enumerate(self._uses):
            self.changes(engine, end_s, use)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the KV memory by use, averaged over time."""
        parts = {
            "token_states": self._token_states,
            "reserved": self._reserved,
            "internal": self._internal,
            "external": self._external,
            "free": self._free,
        }
        total = sum(parts.values()) or 1.0
        return {part: held / total for part, held in parts.items()}

    @property
    def saved(self) -> float:
        """Memory saved by sharing, as a share of the need without sharing."""
        used = self._token_states + self._reserved + self._internal
        return self._shared / (self._shared + used) if self._shared else 0.0
