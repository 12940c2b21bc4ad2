"""The lower bound of a step's time: the bytes and operations it needs, at this device's rates."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.kernels.clock import Clock
from benchmarks.gpu.kernels.moves import measure_bandwidth
from benchmarks.models.random_model import Shape


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of the device, measured in the same run."""

    copied_bytes_per_s: float  # read and written
    read_bytes_per_s: float
    operations_per_s: float  # of a dense matrix product in the model's type

    @property
    def bytes_per_s(self) -> float:
        """The higher rate of both: a decode step does little but read."""
        return max(self.copied_bytes_per_s, self.read_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """The bytes and operations that a step cannot avoid."""

    read_bytes: int
    operations: int

    def limit_s(self, ceilings: Ceilings) -> float:
        """Seconds of the slower of reading and computing."""
        return max(self._reading_s(ceilings), self._computing_s(ceilings))

    def limited_by(self, ceilings: Ceilings) -> str:
        """``bandwidth`` or ``compute``."""
        reads = self._reading_s(ceilings) >= self._computing_s(ceilings)
        return "bandwidth" if reads else "compute"

    def _reading_s(self, ceilings: Ceilings) -> float:
        return self.read_bytes / ceilings.bytes_per_s

    def _computing_s(self, ceilings: Ceilings) -> float:
        return self.operations / ceilings.operations_per_s


@dataclass(frozen=True, slots=True)
class LlamaWork:
    """The work of a Llama's steps.

    Attributes:
        shape: of the model; heads divide the hidden size.
        item_bytes: of one number, in weights and in the KV cache.
    """

    shape: Shape
    item_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values over all layers."""
        return 2 * self.shape.layers * self.shape.kv_heads * self._head_dim * self.item_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes that every step reads: all but the embedding, of which it reads a few rows."""
        norms = (2 * self.shape.layers + 1) * self.shape.hidden
        return (self._layer_weights + self._head_weights + norms) * self.item_bytes

    def decode(self, num_sequences: int, num_context: int) -> Work:
        """The work of a step in which all sequences decode.

        Args:
            num_context: tokens attended to, over all sequences.
        """
        return self._step(num_sequences, num_sequences, num_context, num_context)

    def prefill(self, num_tokens: int) -> Work:
        """The work of one prompt, computed at once, whose last token gives logits."""
        pairs = num_tokens * (num_tokens + 1) // 2
        return self._step(num_tokens, 1, 0, pairs)

    def _step(self, num_tokens: int, num_logits: int, num_cached: int, num_pairs: int) -> Work:
        """The work with ``num_pairs`` of a query token and a token that it attends to."""
        read = self.weight_bytes + num_cached * self.kv_bytes_per_token
        weights = num_tokens * self._layer_weights + num_logits * self._head_weights
        # A pair costs one dot product for its score, and one multiply-add of its value.
        attention = 2 * num_pairs * self.shape.layers * self.shape.heads * self._head_dim
        return Work(read, 2 * (weights + attention))

    @property
    def _head_dim(self) -> int:
        return self.shape.hidden // self.shape.heads

    @property
    def _layer_weights(self) -> int:
        """Numbers in the weights of all layers' linear maps."""
        shape = self.shape
        attention = 2 * shape.heads + 2 * shape.kv_heads  # queries and output, keys and values
        each = attention * self._head_dim * shape.hidden + 3 * shape.hidden * shape.ffn
        return shape.layers * each

    @property
    def _head_weights(self) -> int:
        return self.shape.hidden * self.shape.vocabulary


def measure_ceilings(
    clock: Clock, device: torch.device, dtype: torch.dtype, num_bytes: int, matrix: int
) -> Ceilings:
    """Measure: copy and read ``num_bytes``; multiply square matrices of ``matrix`` rows."""
    copied, read = measure_bandwidth(clock, device, num_bytes)
    left, right = (torch.randn(matrix, matrix, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    timing = clock.time([lambda: torch.mm(left, right, out=product)])
    operations = 2 * matrix**3
    return Ceilings(copied.rate, read.rate, operations / (timing.median_us * 1e-6))
