"""The type of keys and values in the KV cache: ``--kv-dtype``."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gpu_worker.model.ragged_model import LayerShape
from kernels.interface import FP8, INT8, AttentionBackend, may_hold
from shared.errors import SettingsError

_KEY = "--kv-dtype"
_NAMES = {FP8: "fp8"}
# Of GPUs that compute with 8-bit floats.
_FP8_CAPABILITY = (8, 9)
# A row of int8 is followed by float32 in virtual memory.
_INT8_ALIGNMENT = 4


def type_name(dtype: torch.dtype) -> str:
    """The name of a type as ``--kv-dtype`` takes it."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def stored_type(wanted: str | None, own: torch.dtype) -> torch.dtype:
    """The type with a name that ``--kv-dtype`` takes; None: the model's own."""
    if wanted is None:
        return own
    found: torch.dtype = FP8 if wanted == "fp8" else getattr(torch, wanted)
    return found


def stored_shapes(
    shapes: Sequence[LayerShape],
    wanted: str | None,
    device: torch.device,
    backend: AttentionBackend,
) -> tuple[LayerShape, ...]:
    """The attention layers with the type in which the cache holds their keys and values.

    Args:
        shapes: with the type in which the model computes them.
        wanted: a name of a type; None: the model's own.
        device: of the cache.
        backend: reads and writes the cache.

    Raises:
        SettingsError: this type is not possible, with what is.
    """
    if wanted is None:
        return tuple(shapes)
    for shape in shapes:
        reason = _why_not(stored_type(wanted, shape.dtype), shape, device, backend)
        if reason is not None:
            raise SettingsError(_KEY, wanted, reason)
    return tuple(replace(shape, dtype=stored_type(wanted, shape.dtype)) for shape in shapes)


def _why_not(
    dtype: torch.dtype, shape: LayerShape, device: torch.device, backend: AttentionBackend
) -> str | None:
    """Why a layer's keys and values cannot be held in this type; None: they can."""
    own = shape.dtype
    if dtype == own:
        return None
    if not may_hold(dtype, own):
        return f"keys are computed in {type_name(own)}: a cache must be of that type or narrower"
    served = backend.narrow_dtypes(own)
    if dtype not in served:
        names = ", ".join(type_name(each) for each in (own, *served))
        return (
            f"attention backend {backend.name!r} reads no such cache for a model in "
            f"{type_name(own)}; it reads {names}"
        )
    if dtype == FP8 and device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < _FP8_CAPABILITY:
            return (
                f"this GPU, of compute capability {found[0]}.{found[1]}, has no 8-bit floats; "
                "int8 takes hardly more memory"
            )
    if dtype == INT8 and shape.head_dim % _INT8_ALIGNMENT:
        return f"heads of {shape.head_dim} elements are no multiple of {_INT8_ALIGNMENT}"
    return None
