"""No part of a forward pass reads a number from the device, which would prevent its capture.

Tensors of the device ``meta`` have no contents, so that reading them, or mixing them with tensors
on the host, fails.
"""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from gpu_worker.model.attention import ATTENTION_NAME, register_attention
from gpu_worker.model.ragged_model import RaggedModel
from kernels.interface import AttentionParams
from tests.gpu_worker.conftest import ModelPath
from tests.support.models import SERVED, VOCAB_SIZE

META = torch.device("meta")


class NoAttention:
    """Attention without an output."""

    def attend(
        self,
        layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        return torch.empty_like(query)


def on_meta(path: Any, **changes: Any) -> RaggedModel:
    register_attention()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=ATTENTION_NAME, **changes
    )
    return RaggedModel(model.to(META).eval())


def forward(model: RaggedModel, wanted: torch.Tensor | None) -> torch.Tensor:
    numbers = torch.zeros(24, dtype=torch.int64, device=META)
    return model.forward(numbers, numbers, NoAttention(), wanted)


@pytest.mark.parametrize("kind", SERVED)
def test_models_can_be_captured(kind: str, model_path: ModelPath) -> None:
    model = on_meta(model_path(kind))
    assert forward(model, None).shape == (24, VOCAB_SIZE)
    wanted = torch.zeros(5, dtype=torch.int64, device=META)
    assert forward(model, wanted).shape == (5, VOCAB_SIZE)


def test_one_that_looks_at_its_positions_cannot(model_path: ModelPath) -> None:
    config = transformers.AutoConfig.from_pretrained(model_path("llama"))
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = on_meta(model_path("llama"), config=config)
    with pytest.raises(RuntimeError, match="meta"):
        forward(model, None)
