"""A Llama with random weights that are made where they are needed: no file holds them.

A folder with nothing but a configuration names the model's type, seed and device. Whoever loads it
with transformers' own ``AutoModelForCausalLM.from_pretrained`` after ``register`` gets a model
whose weights were drawn on that device; the same folder gives the same weights again. So a model of
16 GB is there in seconds, for our worker as for what it is compared with.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.models.random_model import Shape

_TYPE = "random_llama"
# Spread of a linear layer's outputs. As large as transformers draws weights, 32 layers of 4,096
# amplify bfloat16's rounding almost to what a worker tolerates.
_SPREAD = 0.5


class RandomLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's, with ``weights_seed`` and ``weights_device``."""

    model_type = _TYPE


class RandomLlama(LlamaForCausalLM):  # type: ignore[misc]
    """Llama's own code, without weights to be read."""

    config_class = RandomLlamaConfig

    @classmethod
    def from_pretrained(cls, folder: str, *_: Any, config: Any = None, **wanted: Any) -> Any:
        """The model of a folder that ``write_config`` wrote.

        Args:
            folder: read only if there is no ``config``.
            config: as read from the folder.
            wanted: ``dtype``, ``attn_implementation`` and ``output_loading_info`` count; what else
                transformers hands on speaks of files.

        Returns:
            The model; with ``output_loading_info`` a report beside it, of no tensor missing.
        """
        config = config or RandomLlamaConfig.from_pretrained(folder)
        options = {
            name: wanted[name] for name in ("dtype", "attn_implementation") if name in wanted
        }
        torch.manual_seed(config.weights_seed)
        with torch.device(config.weights_device):
            model = cls._from_config(config, **options)
        if not wanted.get("output_loading_info"):
            return model
        return model, {"missing_keys": (), "unexpected_keys": (), "mismatched_keys": ()}


def register() -> None:
    """Let transformers' auto classes know the type; once or more often."""
    AutoConfig.register(_TYPE, RandomLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(RandomLlamaConfig, RandomLlama, exist_ok=True)


def write_config(
    folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> RandomLlamaConfig:
    """Write the folder that stands for the model.

    Args:
        dtype: that the weights count as published in.
        device: on which they are drawn; weights of one seed differ between kinds of devices.
    """
    config = RandomLlamaConfig(
        **shape.as_llama(),
        initializer_range=_SPREAD / shape.hidden**0.5,
        dtype=dtype,
        weights_seed=seed,
        weights_device=str(device),
    )
    config.save_pretrained(folder)
    return config
