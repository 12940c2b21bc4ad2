"""Weights in few bits for suites that are about tokens: ``WEIGHTS=int8 scripts/test FILES``.

Engines then quantize their models at load, and references of transformers get the same weights,
dequantized.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu_worker.model.quantization.requested_format import apply_quantization

WEIGHTS = os.environ.get("WEIGHTS") or None
"""A format of ``--quantization``; None: the model's own type."""


def reference_model(path: Path) -> Any:
    """A model by transformers' own code in float32, with the weights that engines serve."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if WEIGHTS is not None:
        apply_quantization(model, WEIGHTS)
        apply_quantization(model, "none")
    return model
