"""The whole layers of a split model, one at a time, as references for the check at load.

Rank 0 reads a layer from the files, runs it, drops it, and sends its outputs to the other ranks.
So no rank needs memory for the whole model, and every rank is checked against it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpu_worker.model.check.watched_layers import LayerCall, WatchedLayers
from gpu_worker.model.loader import stored_format
from gpu_worker.model.quantization.requested_format import INT4, INT8
from gpu_worker.model.ragged_model import LayerShape, RaggedModel
from gpu_worker.model.split.load_rounding import LoadRounding
from gpu_worker.model.split.split_loading import build_without_weights
from gpu_worker.model.split.stored_weights import StoredWeights
from gpu_worker.ranks.collectives import Collectives
from gpu_worker.settings import WorkerSettings


class WholeLayers:
    """Computes the outputs of whole layers.

    Args:
        settings: name the model.
        split: the model of this rank.
        shapes: its attention layers.
        collectives: of all ranks, which make the same calls.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        split: RaggedModel,
        shapes: Sequence[LayerShape],
        collectives: Collectives,
    ) -> None:
        self._collectives = collectives
        self._dtype = split.dtype
        self._device = split.device
        self._layers: list[tuple[str, nn.Module]] = []
        self._rounding: LoadRounding | None = None
        if settings.quantization in (INT8, INT4):
            self._rounding = LoadRounding(split.model, collectives)
        if collectives.member.rank:
            return
        config = split.model.config
        model: Any = build_without_weights(config, split.dtype, settings.trust_remote_code)
        self._stored = StoredWeights(settings.model, model, stored_format(settings))
        for module in model.modules():
            if getattr(module, "config", None) is not None:
                module.config = config  # the split model's, which chooses the attention
        places = _places_of_layers(split, shapes)
        self._layers = [(name, model.get_submodule(name)) for name in places]

    def own(self, call: LayerCall) -> torch.Tensor:
        """The output [1, T, K] of a whole layer for the call's arguments."""
        out = torch.empty_like(call.hidden)
        if self._layers:
            layer = self._filled(call.index, self._dtype)
            out = call.run_on(layer, call.hidden).contiguous()
            layer.to("meta")
        return self._sent(out)

    def exact(self, call: LayerCall, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same for other hidden states, in float32."""
        outputs = [torch.empty_like(each) for each in inputs]
        if self._layers:
            layer = self._filled(call.index, torch.float32).float()
            outputs = [call.run_on(layer, each, torch.float32).contiguous() for each in inputs]
            layer.to("meta")
        return [self._sent(each) for each in outputs]

    def _sent(self, out: torch.Tensor) -> torch.Tensor:
        # A copy made outside of inference mode, whose tensors torch.distributed does not write to.
        with torch.inference_mode(mode=False):
            found = out.clone()
        self._collectives.broadcast(found)
        return found

    def _filled(self, index: int, dequantized: torch.dtype) -> nn.Module:
        """The layer with its weights in the model's type; those in few bits in another."""
        name, layer = self._layers[index]
        self._stored.fill(layer, name, self._dtype, dequantized)
        if self._rounding is not None:
            self._rounding.round(layer, name, dequantized)
        return layer.to(self._device)


def _places_of_layers(split: RaggedModel, shapes: Sequence[LayerShape]) -> list[str]:
    """The names of the decoder layers of a model."""
    watched = WatchedLayers(split.model, [shape.module for shape in shapes])
    names = {module: name for name, module in split.model.named_modules()}
    return [names[layer] for layer in watched.layers]
