"""Physical blocks that appear at addresses: what CPUs and GPUs do alike."""

from typing import Protocol

import torch

from gpu_worker.batch.plan_checks import PlanRefused
from shared.errors import PageStreamError


class MapError(PageStreamError):
    """The system does not give memory or addresses."""


class MappingFailed(PlanRefused):
    """Blocks of a plan cannot be mapped: it cannot be carried out here."""


class Mapper(Protocol):
    """A pool of physical blocks, and a space of addresses, reserved, in which blocks appear.

    The space is cut into *places* of a block's size. A block may appear at several places, and
    bytes that are written at one are read at all of them.
    """

    pool: torch.Tensor  # [num_blocks * block_bytes] uint8, all blocks in order
    space: torch.Tensor  # [num_places * block_bytes] uint8; only places with a block may be touched

    @property
    def max_mappings(self) -> int | None:
        """Areas of memory that the system keeps for this space; None: any number."""

    def map(self, place: int, block: int, count: int) -> None:
        """Blocks [block, block + count) appear at places from ``place`` on, whatever was there.

        Raises:
            MapError: there are no blocks at these places now.
        """

    def unmap(self, place: int, count: int) -> None:
        """No blocks are at places [place, place + count), where there may have been some."""

    def begin(self) -> None:
        """A step begins: only what is queued now may read what is unmapped until the next one."""

    def used(self) -> None:
        """Work on what is mapped now is queued."""

    def close(self) -> None:
        """Nobody uses pool or space any more."""
