"""Which node of a Redis Cluster has which hash slot."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_NOT_ANNOUNCED = (None, b"", b"?")  # hosts: the node is reached as the one that replied


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Range:
    first: int
    last: int  # inclusive
    owner: Address


class SlotMap:
    """The owners of slots, as one node saw them.

    Args:
        ranges: of slots, with their owners.
        replicas: nodes that own no slots.
    """

    def __init__(self, ranges: Sequence[_Range] = (), replicas: Sequence[Address] = ()) -> None:
        self._ranges = sorted(ranges, key=lambda one: one.first)
        self._firsts = [one.first for one in self._ranges]
        self._moved: dict[int, Address] = {}
        self.primaries = list(dict.fromkeys(one.owner for one in self._ranges))
        self.nodes = [*self.primaries, *replicas]

    @staticmethod
    def parse(reply: Sequence[Any], asked: Address) -> "SlotMap":
        """The map in a reply to CLUSTER SLOTS.

        Args:
            asked: the node that replied.
        """
        ranges, replicas = [], []
        for first, last, owner, *others in reply:
            ranges.append(_Range(first, last, _address(owner, asked)))
            replicas += [_address(other, asked) for other in others]
        return SlotMap(ranges, list(dict.fromkeys(replicas)))

    def owner(self, slot: int) -> Address | None:
        """The node that has a slot; None: no node has it."""
        if slot in self._moved:
            return self._moved[slot]
        index = bisect_right(self._firsts, slot) - 1
        found = self._ranges[index] if index >= 0 else None
        return found.owner if found is not None and slot <= found.last else None

    def move(self, slot: int, owner: Address) -> None:
        """Note that a slot has another owner than this map says."""
        self._moved[slot] = owner


def _address(node: Sequence[Any], asked: Address) -> Address:
    host, port = node[0], int(node[1])
    return Address(asked.host if host in _NOT_ANNOUNCED else host.decode(), port)
