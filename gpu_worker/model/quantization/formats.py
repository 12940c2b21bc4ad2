"""Chooses the format in which a checkpoint's weights are quantized."""

from collections.abc import Callable, Mapping
from typing import Any

from gpu_worker.model.quantization.checkpoint_format import CheckpointFormat
from gpu_worker.model.quantization.compressed_tensors_format import CompressedTensorsFormat
from gpu_worker.model.quantization.transposed_formats import AwqFormat, GptqFormat
from shared.errors import ModelUnsupported

_FIELD = "quantization_config"
_FORMATS: dict[str, Callable[[str, Mapping[str, Any]], CheckpointFormat]] = {
    "compressed-tensors": CompressedTensorsFormat,
    "gptq": GptqFormat,
    "awq": AwqFormat,
}


def take_format(model_name: str, config: Any) -> CheckpointFormat | None:
    """The format that a configuration names, which is removed from it; None: it names none.

    Args:
        model_name: for errors.
        config: of transformers.

    Raises:
        ModelUnsupported: the format is not served.
    """
    found: Mapping[str, Any] | None = None
    for each in (config.get_text_config(), config):
        if getattr(each, _FIELD, None) is not None:
            found = getattr(each, _FIELD)
            delattr(each, _FIELD)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    if method not in _FORMATS:
        served = ", ".join(_FORMATS)
        reason = f"{_FIELD}.quant_method={method!r} is not served; served are {served} and GGUF"
        raise ModelUnsupported(f"{model_name}: {reason}")
    return _FORMATS[method](model_name, found)
