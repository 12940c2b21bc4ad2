"""Lets transformers load checkpoints whose linear layers are quantized.

transformers builds the model, finds the tensors in the files and reports what does not fit. Before
it reads them, a linear layer whose weight is quantized is replaced by one that holds the format's
own tensors; afterwards, one layer at a time, by a QuantizedLinear.
"""

from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from gpu_worker.model.quantization.checkpoint_format import CheckpointFormat, StoredWeight
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from shared.errors import ModelUnsupported

_METHOD = "pagestream"


class StoredLinear(nn.Module):
    """Holds the tensors that a checkpoint has in place of a linear layer's weight.

    Args:
        linear: the layer, on the meta device.
        stored: its weight.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, stored: StoredWeight) -> None:
        super().__init__()
        self._stored = stored
        for name, tensor in stored.empty.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", linear.bias)

    def quantized(self) -> QuantizedLinear:
        """The layer with the weight that was loaded.

        Raises:
            ValueError: its tensors have values that are not served.
        """
        found = {name: getattr(self, name).data for name in self._stored.empty}
        return QuantizedLinear(self._stored.quantized(found), self.bias)


@register_quantization_config(_METHOD)
class StoredFormat(QuantizationConfigMixin):  # type: ignore[misc]
    """Passes a checkpoint's format through ``from_pretrained``, as its ``quantization_config``."""

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        self.quant_method = _METHOD
        self.checkpoint = checkpoint

    def __deepcopy__(self, memo: Any) -> "StoredFormat":
        return self  # transformers copies configurations, and this one refers to files


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Puts a StoredLinear in the place of each linear layer whose weight is quantized."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        checkpoint: CheckpointFormat = self.quantization_config.checkpoint
        for name, module in list(model.named_modules()):
            if type(module) is not nn.Linear:
                continue
            stored = checkpoint.stored(name, module)
            if stored is not None:
                model.set_submodule(name, StoredLinear(module, stored))
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


@torch.no_grad()
def complete(model_name: str, model: Any) -> None:
    """Replace each StoredLinear by a QuantizedLinear.

    Args:
        model_name: for errors.
        model: as ``from_pretrained`` has loaded it with a ``StoredFormat``.

    Raises:
        ModelUnsupported: names the layer.
    """
    model.hf_quantizer.remove_quantization_config(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredLinear):
            try:
                made = module.quantized()
            except ValueError as error:
                raise ModelUnsupported(f"{model_name}: {name}: {error}") from error
            model.set_submodule(name, made)
