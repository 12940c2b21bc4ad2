"""A Llama with random weights that are generated at load, without weight files.

A folder with nothing but a configuration names the model's type, seed and device. After
``register``, transformers' own ``AutoModelForCausalLM.from_pretrained`` returns a model whose
weights are drawn on that device; the same folder always gives the same weights. So a model of 16 GB
is loaded in seconds, by our worker as by its baselines.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.models.random_model import Shape

_TYPE = "random_llama"
# Spread of a linear layer's outputs. With weights as large as transformers draws them, 32 layers of
# 4,096 amplify bfloat16's rounding almost to the limit of the check at load.
_SPREAD = 0.5


class RandomLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's configuration with ``weights_seed`` and ``weights_device``."""

    model_type = _TYPE


class RandomLlama(LlamaForCausalLM):  # type: ignore[misc]
    """Llama's own code, with weights that are drawn instead of read."""

    config_class = RandomLlamaConfig

    @classmethod
    def from_pretrained(cls, folder: str, *_: Any, config: Any = None, **wanted: Any) -> Any:
        """Make the model of a folder that ``write_config`` wrote.

        Args:
            folder: read only if there is no ``config``.
            config: as read from the folder.
            wanted: only ``dtype``, ``attn_implementation`` and ``output_loading_info`` are used;
                other arguments of transformers concern files.

        Returns:
            The model; with ``output_loading_info`` also a report of no missing tensors.
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
    """Register the type with transformers' auto classes; may be called several times."""
    AutoConfig.register(_TYPE, RandomLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(RandomLlamaConfig, RandomLlama, exist_ok=True)


def write_config(
    folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> RandomLlamaConfig:
    """Write the folder of the model.

    Args:
        dtype: that the configuration names as the weights' own.
        device: to draw weights on; the same seed gives other weights on other kinds of devices.
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
