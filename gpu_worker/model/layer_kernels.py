"""Chooses a loaded model's layers: its own, fused ones for CPU or GPU, or torch.compile's."""

import time
from collections.abc import Mapping

import torch

from gpu_worker.model.check.deviation import CheckResult
from gpu_worker.model.check.load_check import ModelCheck
from gpu_worker.model.ragged_model import LayerShape, RaggedModel
from gpu_worker.model.torch_compiled import compile_layers
from gpu_worker.settings import WorkerSettings
from shared.errors import ModelUnsupported, SettingsError
from shared.logs import EventLog

_INSTEAD = "--layer-kernels off serves it with torch's"

log = EventLog(__name__)


def check_layer_settings(settings: WorkerSettings, device: torch.device) -> None:
    """Refuse settings that exclude each other, before a model is loaded.

    Raises:
        SettingsError: names both settings.
    """
    off = settings.layer_kernels == "off"
    if settings.compile and device.type == "cpu" and not off:
        reason = "on a CPU it needs --layer-kernels off: those layers are compiled already"
        raise SettingsError("--compile", True, reason)
    if settings.compile and settings.tensor_parallel_size > 1:
        reason = "not with --tensor-parallel-size: sums over workers are not compiled"
        raise SettingsError("--compile", True, reason)
    if settings.deterministic and (off or settings.compile):
        other = "--layer-kernels off" if off else "--compile"
        reason = f"not with {other}: those layers round by how many rows there are"
        raise SettingsError("--deterministic", True, reason)


def replace_layers(
    model: RaggedModel,
    shapes: tuple[LayerShape, ...],
    settings: WorkerSettings,
    device: torch.device,
    check: ModelCheck,
) -> None:
    """Replace the model's own layers as the settings demand, and check the result.

    Raises:
        ModelUnsupported: the model does not compute the same with the new layers.
        SettingsError: the model or the machine does not support a setting.
    """
    if settings.compile:
        _torch_compile(model, shapes, check)
    elif settings.layer_kernels == "off":
        return
    elif device.type == "cpu":
        _fuse_on_cpu(model, shapes, settings.deterministic, check)
    elif device.type == "cuda":
        _fuse_on_gpu(model, shapes, settings.deterministic, check)


def _fuse_on_cpu(
    model: RaggedModel, shapes: tuple[LayerShape, ...], deterministic: bool, check: ModelCheck
) -> None:
    from gpu_worker.model.fusion.cpu_fusion import find_kernels, fuse  # it imports numba

    began = time.monotonic()
    kernels = find_kernels(model.dtype)
    if kernels is None:
        _keep_torch_layers(deterministic, f"there are none for this CPU and {model.dtype}")
        return
    attention = [shape.module for shape in shapes]
    found = fuse(model.model, kernels, model.dtype, attention)
    model.packed_bytes = found.weight_bytes
    model.layer_kernels = kernels.instructions.name
    model.products = "+".join(sorted(found.products)) or model.products
    _log_replaced(
        "layers compiled",
        model,
        check,
        began,
        {"instructions": model.layer_kernels, "products": model.products, **found.counts()},
    )
    _warn_of_kept(deterministic, found.kept)


def _fuse_on_gpu(
    model: RaggedModel, shapes: tuple[LayerShape, ...], deterministic: bool, check: ModelCheck
) -> None:
    began = time.monotonic()
    try:
        from gpu_worker.model.fusion.gpu_fusion import fuse_on_gpu
    except ImportError as error:
        _keep_torch_layers(deterministic, f"Triton is missing: {error}")
        return
    found = fuse_on_gpu(model.model, [shape.module for shape in shapes], deterministic)
    model.layer_kernels = "triton"
    _log_replaced("layers fused", model, check, began, found.counts())
    _warn_of_kept(deterministic, found.kept)


def _keep_torch_layers(deterministic: bool, because: str) -> None:
    """Log that the layers stay torch's.

    Raises:
        SettingsError: torch's layers are not deterministic.
    """
    if deterministic:
        raise SettingsError(
            "--deterministic", True, f"it needs other layers than torch's; {because}"
        )
    log.info("layers are torch's own", because=because)


def _warn_of_kept(deterministic: bool, kept: int) -> None:
    if deterministic and kept:
        log.warning("not deterministic: some linear layers stay torch's", layers=kept)


def _log_replaced(
    event: str, model: RaggedModel, check: ModelCheck, began: float, counts: Mapping[str, object]
) -> None:
    try:
        result = check.layers(_INSTEAD)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"model type {model.config.model_type!r}: {error}") from error
    _log(event, counts, result, began)


def _torch_compile(model: RaggedModel, shapes: tuple[LayerShape, ...], check: ModelCheck) -> None:
    began = time.monotonic()
    _log("layers compiled by torch", {}, compile_layers(model, shapes, check), began)
    model.layer_kernels = "torch.compile"


def _log(event: str, counts: Mapping[str, object], result: CheckResult, began: float) -> None:
    log.info(
        event,
        **counts,
        **result.for_log(),
        seconds=round(time.monotonic() - began, 1),
    )
