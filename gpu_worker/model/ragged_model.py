"""Runs a transformers model on a ragged batch."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from gpu_worker.model.attention import ATTENTION_NAME, STEP_KEYWORD, AttentionStep
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from kernels.interface import INT8, AttentionParams, RowArgmax
from shared.errors import ModelUnsupported

# A method of transformers' models that looks for padding in every batch. A ragged batch has none.
# On a GPU the method would wait for the device, and could not be captured in a graph.
_PADDING_WARNING = "warn_if_padding_and_no_attention_mask"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The K/V shape and the parameters of one attention layer, observed in a forward pass.

    Attributes:
        dtype: of keys and values: as the model computes them, or as the cache holds them.
    """

    module: nn.Module
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    params: AttentionParams

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, scales included."""
        return 2 * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + self.scale_bytes)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one key or value; 0: it has none."""
        return torch.float32.itemsize if self.dtype == INT8 else 0


class DirectLogits(Protocol):
    """Computes logits without the model's own code."""

    def serves(self, step: AttentionStep, num_tokens: int) -> bool:
        """Whether it supports this step."""

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same as ``RaggedModel.forward``."""

    def argmax(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
    ) -> RowArgmax | torch.Tensor:
        """The same as ``RaggedModel.argmax``."""


class RaggedModel:
    """Runs the model's own code with paged attention.

    Args:
        model: a decoder with a head, in evaluation mode.
        weight_format: of its linear layers (see ``requested_format``).

    Attributes:
        weight_format: the same; none: weights have the model's type.
        layer_kernels: the instructions or the library that compute its layers.
        products: types of the numbers that its linear layers multiply.
        direct_pass: computes the same results for the steps that it serves; None: there is none.
    """

    def __init__(self, model: Any, weight_format: str = "none") -> None:
        self.model = model
        self.weight_format = weight_format
        self.config = model.config.get_text_config()
        self.layer_kernels = "torch"
        self.products = str(model.dtype).removeprefix("torch.")
        self.direct_pass: DirectLogits | None = None
        self.packed_bytes = 0  # of weights that cpu_fusion has packed; they are no parameters
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = self.config.vocab_size
        self.num_parameters = _num_parameters(model)  # now, because layers may be replaced later
        for module in model.modules():
            if hasattr(module, _PADDING_WARNING):
                setattr(module, _PADDING_WARNING, _ignore_warning)
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        own: int = sum(weight.nbytes for weight in self.model.parameters())
        quantized = sum(each.nbytes for layer in _quantized(self.model) for each in layer.buffers())
        return self.packed_bytes + own + quantized

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        step: AttentionStep,
        rows: torch.Tensor | None,  # [R] int64, those whose logits are wanted; None: all
    ) -> torch.Tensor:
        """Logits [R, vocabulary], float32 or in the model's own type; valid until the next call."""
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.forward(token_ids, positions, step, rows)
        if self.direct_pass is not None and self.direct_pass.serves(step, token_ids.shape[0]):
            return self.direct_pass.logits(token_ids, positions, step, rows)
        arguments: dict[str, Any] = {STEP_KEYWORD: step}
        if self._picks_rows:
            arguments["logits_to_keep"] = 0 if rows is None else rows
        output = self.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **arguments,
        )
        logits: torch.Tensor = output.logits[0]
        return logits if rows is None or self._picks_rows else logits[rows]

    def argmax(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        step: AttentionStep,
    ) -> RowArgmax | torch.Tensor:
        """The argmax token of every row, or logits [T, vocabulary]; valid until the next call."""
        if self.direct_pass is not None and self.direct_pass.serves(step, token_ids.shape[0]):
            return self.direct_pass.argmax(token_ids, positions, step)
        return self.forward(token_ids, positions, step, rows=None)

    @torch.inference_mode()
    def eager_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocabulary] of one sequence [T] by transformers' own attention."""
        with self.eager():
            logits: torch.Tensor = self.model(input_ids=token_ids.unsqueeze(0), use_cache=False)[0]
        return logits[0]

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run the model with transformers' own attention inside the block."""
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)

    def observe_layers(self) -> tuple[LayerShape, ...]:
        """The attention layers in the order in which they run, observed in a pass over two tokens.

        Raises:
            ModelUnsupported: the model does not call the registered attention function, or attends
                in a way that a paged cache does not support.
        """
        probe = _Probe()
        token_ids = torch.zeros(2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)
        try:
            self.forward(token_ids, positions, probe, rows=None)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # not the model's fault
            raise
        except TypeError as error:  # its forward has no such keyword
            raise ModelUnsupported(f"its forward refuses our arguments: {error}") from error
        except (AttributeError, LookupError, RuntimeError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            raise ModelUnsupported(f"its forward fails: {type(error).__name__}: {why}") from error
        if not probe.layers:
            raise ModelUnsupported(
                "its attention is built in (no AttentionInterface), or it has none"
            )
        return tuple(probe.layers.values())


def _quantized(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def _num_parameters(model: Any) -> int:
    """Parameters of a model of transformers; weights that layers share count once."""
    count: int = sum(weight.numel() for weight in model.parameters())
    # A quantized output layer has codes of its own for a weight that it shares.
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    tied = model.get_output_embeddings() if is_tied else None
    for layer in _quantized(model):
        count += 0 if layer is tied else layer.codes.numel()
    return count


def _ignore_warning(*args: Any, **kwargs: Any) -> None:
    pass


class _Probe:
    """Records the shapes that each layer passes in; its outputs are zeros."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, LayerShape] = {}

    def attend(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        assert value.shape == key.shape, (value.shape, key.shape)
        if layer in self.layers:
            raise ModelUnsupported("one attention module runs twice in a forward pass")
        num_tokens, num_kv_heads, head_dim = key.shape
        if num_tokens != query.shape[0]:
            raise ModelUnsupported("its attention looks at tokens that are not in the batch")
        if query.shape[1] % num_kv_heads:
            raise ModelUnsupported(f"{query.shape[1]} heads over {num_kv_heads} KV heads")
        self.layers[layer] = LayerShape(layer, num_kv_heads, head_dim, key.dtype, params)
        return torch.zeros_like(query)
