"""Imports a model's code and loads the CPU kernels ahead of time, before processes are forked."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from gpu_worker.kv.cache_types import stored_type
from gpu_worker.model.loader import choose_dtype, own_dtype, refuse_by_config
from gpu_worker.model.quantization.formats import take_format
from gpu_worker.model.quantization.gguf_config import make_config
from gpu_worker.settings import WorkerSettings
from shared.gguf.header import read_header
from shared.gguf.location import gguf_file_of
from shared.logs import EventLog

_SLOW_S = 1.0
_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))

log = EventLog(__name__)


def preload(settings: WorkerSettings) -> None:
    """Import the model's code and load the CPU kernels, without a thread, a GPU or a connection.

    Failures are ignored: the worker meets them again when it starts, and reports them there.
    """
    try:
        config = _config(settings.model)
        refuse_by_config(config)
        assert MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # looking it up imports it
        if _computes_on_cpu(settings):
            _load_all(_kernels(settings, config))
    except Exception as error:  # the worker's start fails in the same way and reports it
        log.debug("not everything is loaded ahead", error=error)


def _config(model: str) -> Any:
    """The model's configuration, from its files or the hub's cache."""
    file = gguf_file_of(model)
    if file is not None:
        return make_config(read_header(file))
    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    take_format(model, config)  # imports the format's library
    return config


def _load_all(loads: Sequence[Callable[[], object]]) -> None:
    """Compile kernels, or load them from numba's cache; log progress if it is slow."""
    began_s = time.monotonic()
    for num_loaded, load in enumerate(loads, 1):
        load()
        if time.monotonic() - began_s > _SLOW_S:
            log.info("compiling CPU kernels", done=num_loaded, of=len(loads))


def _kernels(settings: WorkerSettings, config: Any) -> list[Callable[[], object]]:
    """A loader for each kernel that this model is known to need."""
    from gpu_worker.sampling import cpu_argmax, cpu_bans, cpu_penalties
    from kernels.cpu.attention.attention_kernel import attend_kernel
    from kernels.cpu.attention.cache_write_kernel import write_kernel
    from kernels.cpu.elementwise.norm_kernel import norm_kernel
    from kernels.cpu.linear.linear_kernel import linear_kernel
    from kernels.cpu.runtime.instruction_set import best_dot, detect
    from kernels.cpu.sampling import sampler
    from kernels.cpu.sampling.pruned_argmax_entry_points import is_served, pruned_argmax_kernels

    own = own_dtype(config)
    dtype = choose_dtype(settings.dtype, own, torch.device("cpu"))
    kv_dtype = stored_type(settings.kv_dtype, dtype)
    loads: list[Callable[[], object]] = [
        cpu_argmax.warm_up,
        cpu_bans.warm_up,
        cpu_penalties.warm_up,
        partial(write_kernel, dtype, kv_dtype),
        sampler.load,
        partial(attend_kernel, dtype, best_dot(), kv_dtype),
    ]
    instructions = detect()
    if settings.layer_kernels == "auto" and instructions is not None:
        loads.append(partial(norm_kernel, dtype))
        packed = torch.bfloat16 if torch.bfloat16 in (own, dtype) else torch.float32
        loads.append(partial(linear_kernel, packed, dtype, instructions))
        if dtype == torch.bfloat16 and is_served(instructions):
            loads.append(partial(pruned_argmax_kernels, instructions))
    return loads


def _computes_on_cpu(settings: WorkerSettings) -> bool:
    """Whether the worker will use the CPU; does not call CUDA, which must not run before a fork."""
    if settings.device is not None:
        return settings.device == "cpu"
    return torch.version.cuda is None or not any(path.exists() for path in _GPU_DRIVERS)
