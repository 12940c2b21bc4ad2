"""Compiles the model's layers with torch.compile, except attention."""

from collections.abc import Sequence

from torch import nn

from gpu_worker.model.attention import register_uncompiled_attention
from gpu_worker.model.check.deviation import CheckResult
from gpu_worker.model.check.load_check import ModelCheck
from gpu_worker.model.ragged_model import LayerShape, RaggedModel
from shared.errors import ModelUnsupported, SettingsError


def compile_layers(
    model: RaggedModel, shapes: Sequence[LayerShape], check: ModelCheck
) -> CheckResult:
    """Compile each decoder layer in place, once for all numbers of tokens.

    Args:
        model: as it was loaded.
        shapes: its attention layers.
        check: of the model as it was loaded.

    Returns:
        The deviation of the compiled layers from the layers as loaded.

    Raises:
        SettingsError: the layers cannot be compiled, or do not compute the same.
    """
    layers = decoder_layers(model.model, [shape.module for shape in shapes])
    if not layers:
        raise SettingsError("--compile", True, "this model has no list of layers to compile")
    register_uncompiled_attention()
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        return check.layers("without --compile it is served as it is")
    except ModelUnsupported as error:
        raise SettingsError("--compile", True, str(error)) from error
    except Exception as error:  # of any type: a compiler is missing, or fails
        why = str(error).strip().partition("\n")[0]
        reason = f"the layers cannot be compiled: {type(error).__name__}: {why}"
        raise SettingsError("--compile", True, reason) from error


def decoder_layers(model: nn.Module, attention: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a module list that contain attention layers, in order."""
    wanted = set(attention)
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for member in module:
                if wanted.intersection(member.modules()):
                    found[member] = None
    return list(found)
