"""The interface for mapping physical blocks to addresses, on CPUs and GPUs alike."""

from typing import Protocol

import torch

from gpu_worker.batch.plan_checks import PlanRefused
from shared.errors import PageStreamError


class MapError(PageStreamError):
    """The system or the driver refused memory, addresses or a mapping."""


class AddressesRefused(MapError):
    """The system or the driver reserves fewer addresses than were wanted."""


class MappingFailed(PlanRefused):
    """Blocks of a plan cannot be mapped, so that this worker cannot carry it out."""


class Mapper(Protocol):
    """A pool of physical blocks, and a space of reserved addresses into which they are mapped.

    The space is divided into *places* of a block's size. A block may be mapped at several places;
    bytes that are written at one are read at all of them.
    """

    pool: torch.Tensor  # [num_blocks * block_bytes] uint8, all blocks in order
    space: torch.Tensor  # [num_places * block_bytes] uint8; readable only where a block is mapped

    @property
    def max_mappings(self) -> int | None:
        """Mappings that the operating system allows for this space; None: any number."""

    def map(self, place: int, block: int, count: int) -> None:
        """Map blocks [block, block + count) at places from ``place`` on, replacing any there.

        Raises:
            MapError: it failed; no blocks are mapped at these places now.
        """

    def unmap(self, place: int, count: int) -> None:
        """Unmap the places [place, place + count), of which any may be mapped."""

    def begin_step(self) -> None:
        """Begin a step: from now on ``unmap`` waits for the work that is queued by now."""

    def mark_queued(self) -> None:
        """Mark that the work on the present mappings is queued."""

    def close(self) -> None:
        """Release memory and addresses; pool and space must not be used any more."""
