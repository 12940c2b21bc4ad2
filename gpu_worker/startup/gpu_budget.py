"""Computes how much of a GPU's memory is left for the KV pool."""

from dataclasses import dataclass

from shared.errors import SettingsError

_GIB = 2**30
# For kernels that are loaded later, small buffers, and rounding by allocators.
_RESERVE_BYTES = 192 * 2**20


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of steps besides weights and pool.

    Attributes:
        activation_bytes: of the largest step while it computes and samples.
        graph_bytes: of all CUDA graphs.
    """

    activation_bytes: int = 0
    graph_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """A GPU's memory before the pool is allocated.

    Attributes:
        total_bytes: of its memory.
        used_bytes: by all processes, the weights included.
        weight_bytes: of the model.
        step: memory to leave free for steps.
        utilization: share of all memory that may be used.
    """

    total_bytes: int
    used_bytes: int
    weight_bytes: int
    step: StepMemory
    utilization: float

    @property
    def pool_bytes(self) -> int:
        """Bytes left for keys and values; negative if the rest needs more than there is."""
        needed = self.step.activation_bytes + self.step.graph_bytes + _RESERVE_BYTES
        return int(self.utilization * self.total_bytes) - self.used_bytes - needed

    def num_blocks(self, block_bytes: int) -> int:
        """Number of blocks that fit.

        Raises:
            SettingsError: none fits; the error lists the uses of the memory.
        """
        found = self.pool_bytes // block_bytes
        if found < 1:
            raise SettingsError(
                "--gpu-memory-utilization", self.utilization, self._why(block_bytes)
            )
        return found

    def _why(self, block_bytes: int) -> str:
        others = max(0, self.used_bytes - self.weight_bytes)
        parts = {
            "weights": self.weight_bytes,
            "in use besides": others,
            "the largest step": self.step.activation_bytes,
            "CUDA graphs": self.step.graph_bytes,
            "a reserve": _RESERVE_BYTES,
        }
        listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items() if size)
        return (
            f"of {self.utilization * self.total_bytes / _GIB:.2f} GiB nothing is left for a pool "
            f"whose blocks take {block_bytes} bytes ({listed} GiB); raise it, stop what else uses "
            "the GPU, or lower --max-num-batched-tokens and --max-num-sequences"
        )
