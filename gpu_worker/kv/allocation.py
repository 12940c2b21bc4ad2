"""Allocates KV memories of the kind that ``--kv-memory`` names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.kv import cpu_mapping, cuda_mapping
from gpu_worker.kv.mapping import AddressesRefused, MapError, Mapper
from gpu_worker.kv.memory import KVMemory, PagedMemory, bytes_per_block
from gpu_worker.kv.token_layout import TokenLayout, fit_tokens
from gpu_worker.kv.virtual_memory import NUM_RESERVED, VirtualMemory
from gpu_worker.model.ragged_model import LayerShape
from gpu_worker.settings import WorkerSettings
from shared.errors import SettingsError
from shared.logs import EventLog

# Reserving addresses costs nothing, but they are limited: 2^47 bytes on most CPUs.
_SPACE_BYTES = 2**44
_MOST_RANGES = 4_096

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class PagedAllocator:
    """Allocates paged memories.

    Attributes:
        block_size: tokens in a block.
        device: of the device pool.
        layout: of the device pool, see ``PagedMemory``.
    """

    block_size: int
    device: torch.device
    layout: str = "layer_major"

    @property
    def most_blocks(self) -> int | None:
        """Limit on the number of blocks; None: there is none."""
        return None

    def block_bytes(self, shapes: Sequence[LayerShape]) -> int:
        """Bytes of a block in the device pool."""
        return bytes_per_block(shapes, self.block_size)

    def allocate(
        self, shapes: Sequence[LayerShape], num_blocks: int, num_host_blocks: int = 0
    ) -> KVMemory:
        """A memory with pools of these sizes."""
        return PagedMemory(
            shapes, num_blocks, self.block_size, self.device, num_host_blocks, self.layout
        )


@dataclass(frozen=True, slots=True)
class VirtualAllocator:
    """Allocates virtual memories.

    Attributes:
        block_size: tokens in a block.
        device: of the device pool.
        max_model_len: longest sequence in tokens.
        page_bytes: of the operating system or the driver.
        max_mappings: that the operating system allows; None: any number.
    """

    block_size: int
    device: torch.device
    max_model_len: int
    page_bytes: int
    max_mappings: int | None

    @property
    def most_blocks(self) -> int | None:
        """Limit on the number of blocks: so many can be mapped one by one; None: no limit."""
        if self.max_mappings is None:
            return None
        return max(0, self.max_mappings - _MOST_RANGES)  # the free rest of a range is a mapping too

    def block_bytes(self, shapes: Sequence[LayerShape]) -> int:
        """Bytes of a block in the device pool.

        Raises:
            SettingsError: blocks of this size cannot be mapped.
        """
        layout = fit_tokens(shapes, self.block_size, self.page_bytes)
        if layout.token_bytes > layout.used_bytes:
            log.warning(
                "tokens are padded so that blocks are whole pages",
                block_size=self.block_size,
                page_bytes=self.page_bytes,
                bytes_per_token=layout.used_bytes,
                padded_to=layout.token_bytes,
                wasted=f"{1 - layout.used_bytes / layout.token_bytes:.0%}",
            )
        return layout.block_bytes

    def allocate(
        self, shapes: Sequence[LayerShape], num_blocks: int, num_host_blocks: int = 0
    ) -> KVMemory:
        """A memory with pools of these sizes.

        Raises:
            SettingsError: the system has too little memory, too few addresses or too few mappings.
        """
        if self.most_blocks is not None and num_blocks > self.most_blocks:
            reason = (
                f"the system's limit on mappings allows {self.most_blocks} blocks: "
                "use larger blocks (--block-size) or raise vm.max_map_count"
            )
            raise SettingsError("--num-blocks", num_blocks, reason)
        layout = fit_tokens(shapes, self.block_size, self.page_bytes)
        max_blocks = -(-self.max_model_len // self.block_size)
        num_ranges = min(_MOST_RANGES, _SPACE_BYTES // (max_blocks * layout.block_bytes))
        if num_ranges <= NUM_RESERVED:
            reason = f"a sequence takes {max_blocks * layout.block_bytes} bytes of addresses"
            raise SettingsError("--max-model-len", self.max_model_len, reason)
        try:
            mapper = self._mapper(num_blocks, num_ranges, max_blocks, layout)
        except MapError as error:
            raise SettingsError("--kv-memory", "virtual", str(error)) from error
        return VirtualMemory(layout, mapper, num_blocks, max_blocks, num_host_blocks)

    def _mapper(
        self, num_blocks: int, num_ranges: int, max_blocks: int, layout: TokenLayout
    ) -> Mapper:
        size = layout.block_bytes
        if self.device.type == "cpu":
            assert self.max_mappings is not None
            num_places = num_ranges * max_blocks
            return cpu_mapping.CpuMapper(num_blocks, num_places, size, self.max_mappings)
        driver = cuda_mapping.load_driver()
        events: tuple[cuda_mapping.Event, cuda_mapping.Event] = (
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )

        def make(num_ranges: int) -> Mapper:
            num_places = num_ranges * max_blocks
            return cuda_mapping.CudaMapper(
                driver, events, self.device, num_blocks, num_places, size
            )

        return with_as_many_ranges(make, num_ranges)


def with_as_many_ranges(make: Callable[[int], Mapper], num_ranges: int) -> Mapper:
    """A mapper with so many ranges of addresses, or a half, a quarter and so on: drivers differ.

    Raises:
        AddressesRefused: not even one sequence's addresses are reserved.
    """
    while True:
        try:
            return make(num_ranges)
        except AddressesRefused as error:
            num_ranges //= 2
            if num_ranges <= NUM_RESERVED:
                raise
            log.warning("the driver reserves fewer addresses", sequences=num_ranges, error=error)


Allocator = PagedAllocator | VirtualAllocator


def choose_allocator(
    settings: WorkerSettings, device: torch.device, max_model_len: int
) -> Allocator:
    """The allocator that ``--kv-memory`` names.

    Raises:
        SettingsError: this machine does not support it.
    """
    if settings.kv_memory == "paged":
        return PagedAllocator(settings.block_size, device, settings.kv_layout)
    max_mappings = None
    try:
        if device.type == "cpu":
            page_bytes, max_mappings = cpu_mapping.PAGE_BYTES, cpu_mapping.spare_mappings()
        elif device.type == "cuda":
            page_bytes = cuda_mapping.page_bytes(cuda_mapping.load_driver(), device.index or 0)
        else:
            raise MapError(f"not on device {device}")
    except MapError as error:
        raise SettingsError("--kv-memory", "virtual", str(error)) from error
    return VirtualAllocator(settings.block_size, device, max_model_len, page_bytes, max_mappings)
