"""What loading needs from a format of quantized checkpoints."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from kernels.quantized_weight import QuantizedWeight


class StoredWeight(Protocol):
    """The weight of one linear layer, as a checkpoint stores it."""

    @property
    def empty(self) -> Mapping[str, torch.Tensor]:
        """Tensors on the meta device, with the names, shapes and types of those in the files."""

    def quantized(self, found: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """The weight [N, K] in such tensors.

        Raises:
            ValueError: they have values that are not served.
        """


class CheckpointFormat(Protocol):
    """How a checkpoint stores the weights of its quantized linear layers.

    Attributes:
        name: for the log.
    """

    name: str

    def stored(self, name: str, linear: nn.Linear) -> StoredWeight | None:
        """How a layer's weight is stored; None: it is not quantized.

        Args:
            name: of the layer in the model.
            linear: the layer, on the meta device.

        Raises:
            ModelUnsupported: the layer's shape does not fit the format.
        """


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")
