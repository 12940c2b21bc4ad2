"""What of a GPU's memory is left for the KV pool."""

from dataclasses import dataclass

from shared.errors import SettingsError

_GIB = 2**30
# Kernels that are loaded later, small buffers, and what allocators round up.
_RESERVE_BYTES = 192 * 2**20


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the largest step needs besides weights and pool.

    Attributes:
        activation_bytes: while it computes and samples.
        graph_bytes: kept for as long as there are CUDA graphs.
    """

    activation_bytes: int = 0
    graph_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """A GPU before the pool is allocated.

    Attributes:
        total_bytes: of its memory.
        used_bytes: by whomever, weights among it.
        weight_bytes: of the model.
        step: what is to be left free for steps.
        utilization: share of all memory that may be used.
    """

    total_bytes: int
    used_bytes: int
    weight_bytes: int
    step: StepMemory
    utilization: float

    @property
    def pool_bytes(self) -> int:
        """For keys and values; below zero: what there is too little."""
        needed = self.step.activation_bytes + self.step.graph_bytes + _RESERVE_BYTES
        return int(self.utilization * self.total_bytes) - self.used_bytes - needed

    def num_blocks(self, block_bytes: int) -> int:
        """How many blocks fit.

        Raises:
            SettingsError: none; says where the memory is.
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
