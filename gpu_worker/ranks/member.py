"""A worker's place among the workers of its engine."""

import os
import socket
from dataclasses import dataclass

from shared.errors import PageStreamError


class GroupOver(PageStreamError):
    """The group of ranks cannot go on: the process must end, and its successor joins another."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's rank, and the group that it has joined.

    Attributes:
        rank: from 0.
        num_ranks: workers of the engine.
        group: name of the group, which rank 0 draws; "" before it is formed, and of one worker.
        address: of the group's store, HOST:PORT; "" except for rank 0.
        parent: of the process, which has one worker at a time; "": unknown.
    """

    rank: int = 0
    num_ranks: int = 1
    group: str = ""
    address: str = ""
    parent: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether the engine has one worker."""
        return self.num_ranks == 1

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(rank for rank in range(self.num_ranks) if rank != self.rank)


ALONE = Member()
"""The only worker of an engine."""


def this_parent() -> str:
    """The name of this process's parent: a spawner, which forks one worker after the other."""
    return f"{socket.gethostname()}/{os.getppid()}"
