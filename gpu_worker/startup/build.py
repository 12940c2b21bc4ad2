"""Builds a worker from its settings: model, check, pools, executor."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpu_worker.batch.plan_checks import Limits
from gpu_worker.grammar.tokenizer import load_grammar_tokenizer
from gpu_worker.kv.allocation import Allocator, choose_allocator
from gpu_worker.kv.cache_types import stored_shapes
from gpu_worker.kv.memory import KVMemory, check_block_size
from gpu_worker.kv.pool_sizes import choose_num_blocks, choose_num_host_blocks, memory_left
from gpu_worker.model.check.load_check import ModelCheck
from gpu_worker.model.check.reference_pass import LayerReferences
from gpu_worker.model.check.tokens import text_tokens
from gpu_worker.model.layer_kernels import check_layer_settings, replace_layers
from gpu_worker.model.loader import choose_device, context_length, eos_token_ids, load_model
from gpu_worker.model.ragged_model import LayerShape, RaggedModel
from gpu_worker.model.split.whole_layers import WholeLayers
from gpu_worker.model.tokenizer_file import TokenizerFile
from gpu_worker.ranks.ranks import Ranks
from gpu_worker.sampling import kernels as sampling_kernels
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.gpu_budget import GpuBudget
from gpu_worker.startup.speeds import measure_speeds
from gpu_worker.startup.step_profile import StepProfile, measure_steps
from gpu_worker.step.buckets import Buckets
from gpu_worker.step.executor import Executor, StepLimits
from kernels.interface import AttentionBackend
from kernels.select import select_backend
from shared.errors import ModelUnsupported, SettingsError
from shared.logs import EventLog
from shared.messages.leases import ModelInfo, Speeds
from shared.model_name import model_name, model_root

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    """A built worker and its description for the lease and for metrics.

    Attributes:
        kernels: format of the weights and kernels for them, by names of labels.
    """

    executor: Executor
    model: ModelInfo
    speeds: Speeds
    weight_bytes: int
    pool_bytes: int
    kernels: Mapping[str, str]


def build_worker(
    settings: WorkerSettings,
    backend: AttentionBackend | None = None,
    ranks: Ranks | None = None,
) -> Worker:
    """Load the model, check it, allocate the pools, and measure prefill and swapping.

    Args:
        settings: of the worker.
        backend: attention kernels to use instead of those that the settings name.
        ranks: other workers with parts of the model, which build theirs now; None: there are none.

    Raises:
        GroupOver: another rank is gone or late.
        ModelUnsupported: the model cannot be served correctly.
        SettingsError: a setting does not fit the model or the machine.
    """
    device = _prepare_device(settings)
    began = time.monotonic()
    model = load_model(settings, device, ranks)
    shapes = attention_layers(model)
    if backend is None:
        backend = _backend(settings, device, shapes)
    stored = stored_shapes(shapes, settings.kv_dtype, device, backend)
    _log_loaded(model, device, backend, len(shapes), time.monotonic() - began)
    if device.type == "cpu":
        sampling_kernels.on_cpu().warm_up()
    max_model_len = context_length(model.config, settings.max_model_len)
    tokenizer_file = TokenizerFile(settings.model)
    references = None if ranks is None else WholeLayers(settings, model, shapes, ranks.collectives)
    check = _begin_check(model, shapes, max_model_len, tokenizer_file, references)
    replace_layers(model, shapes, settings, device, check)
    allocator = choose_allocator(settings, device, max_model_len)
    block_bytes = allocator.block_bytes(stored)
    _check_attention(model, check, backend, allocator, stored[0].dtype)
    buckets = _buckets(settings, device, backend)
    gpu = None
    given = settings.num_blocks is not None or settings.kv_memory_bytes is not None
    if device.type == "cuda" and not given:
        profile = StepProfile(model, stored, backend, allocator, max_model_len)
        gpu = _gpu_budget(settings, model, profile, buckets)
    num_blocks = choose_num_blocks(
        settings, block_bytes, max_model_len, gpu, allocator.most_blocks, memory_left(device)
    )
    num_blocks = num_blocks if ranks is None else ranks.minimum(num_blocks)
    memory = _allocate(settings, stored, num_blocks, allocator)
    eos = eos_token_ids(model.model)
    limits = Limits(memory.geometry, model.vocab_size, max_model_len, eos)
    tokenizer = load_grammar_tokenizer(tokenizer_file, model.vocab_size, eos)
    info = _model_info(settings, model, limits, takes_grammars=tokenizer is not None)
    largest = StepLimits(settings.max_num_batched_tokens, settings.max_num_sequences)
    executor = Executor(model, memory, backend, limits, largest, grammar_tokenizer=tokenizer)
    if buckets is not None:
        executor.capture_graphs(buckets)
    if device.type == "cpu":
        _replay_on_cpu(executor, model, shapes, backend, settings)
    speeds, kernels = _measure(executor, memory, ranks), _kernels_of(model, backend)
    pool_bytes = num_blocks * memory.geometry.bytes_per_block
    return Worker(executor, info, speeds, model.weight_bytes, pool_bytes, kernels)


def _replay_on_cpu(
    executor: Executor,
    model: RaggedModel,
    shapes: tuple[LayerShape, ...],
    backend: AttentionBackend,
    settings: WorkerSettings,
) -> None:
    from gpu_worker.model.graph.replay_check import replay_layers  # it imports numba

    replay_layers(executor, model, shapes, backend, settings)


def _prepare_device(settings: WorkerSettings) -> torch.device:
    """The device, after a check of the settings that belong to it."""
    check_block_size(settings.block_size)
    device = choose_device(settings.device, settings.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of kernel launches
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    check_layer_settings(settings, device)
    return device


def _model_info(
    settings: WorkerSettings, model: RaggedModel, limits: Limits, takes_grammars: bool
) -> ModelInfo:
    return ModelInfo(
        name=model_name(settings.model, settings.served_model_name),
        vocab_size=model.vocab_size,
        max_model_len=limits.max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=limits.eos_token_ids,
        takes_grammars=takes_grammars,
        weights=model.weight_format,
        root=model_root(settings.model),
    )


def _kernels_of(model: RaggedModel, backend: AttentionBackend) -> dict[str, str]:
    """The format of a model's weights and the kernels of its layers, by names of labels."""
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.weight_format,
        "layer_kernels": model.layer_kernels,
        "products": model.products,
        "attention": backend.name,
    }


def _log_loaded(
    model: RaggedModel,
    device: torch.device,
    backend: AttentionBackend,
    num_layers: int,
    seconds: float,
) -> None:
    log.info(
        "model loaded",
        parameters=model.num_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
        weights=model.weight_format,
        device=device,
        backend=backend.name,
        layers=num_layers,
        threads=torch.get_num_threads(),
        seconds=round(seconds, 1),
    )


def attention_layers(model: RaggedModel) -> tuple[LayerShape, ...]:
    """The model's attention layers, found by a pass over two tokens.

    Raises:
        ModelUnsupported: the model cannot be served; the error names its type.
    """
    try:
        return model.observe_layers()
    except ModelUnsupported as error:
        raise ModelUnsupported(f"model type {model.config.model_type!r}: {error}") from error


def _backend(
    settings: WorkerSettings, device: torch.device, shapes: tuple[LayerShape, ...]
) -> AttentionBackend:
    name = settings.attention_backend
    if name == "sdpa" and settings.kv_memory != "virtual":
        reason = f"not with --kv-memory {settings.kv_memory}"
        raise SettingsError("--attention-backend", name, reason)
    try:
        backend = select_backend(name, device.type, shapes[0].dtype, settings.deterministic)
    except (ValueError, ImportError) as error:
        raise SettingsError("--attention-backend", name or "auto", str(error)) from error
    return backend


def _allocate(
    settings: WorkerSettings,
    shapes: tuple[LayerShape, ...],
    num_blocks: int,
    allocator: Allocator,
) -> KVMemory:
    num_host_blocks = choose_num_host_blocks(settings, shapes, num_blocks)
    memory = allocator.allocate(shapes, num_blocks, num_host_blocks)
    bytes_each = memory.geometry.bytes_per_block
    log.info(
        "KV pools allocated",
        kind=settings.kv_memory,
        dtype=memory.geometry.dtype,
        blocks=num_blocks,
        block_size=settings.block_size,
        tokens=num_blocks * settings.block_size,
        bytes=num_blocks * bytes_each,
        host_blocks=num_host_blocks,
        host_bytes=num_host_blocks * bytes_each,
    )
    return memory


def _measure(executor: Executor, memory: KVMemory, ranks: Ranks | None) -> Speeds:
    began = time.monotonic()
    speeds = measure_speeds(executor, memory, bool if ranks is None else ranks.all)
    log.info(
        "speeds measured",
        prefill_tokens_per_s=round(speeds.prefill_tokens_per_s),
        swap_bytes_per_s=round(speeds.swap_bytes_per_s),
        step_overhead_us=round(1e6 * speeds.step_overhead_s),
        decode_token_us=round(1e6 * speeds.decode_token_s),
        seconds=round(time.monotonic() - began, 2),
    )
    return speeds


def _begin_check(
    model: RaggedModel,
    shapes: tuple[LayerShape, ...],
    max_model_len: int,
    tokenizer_file: TokenizerFile,
    references: LayerReferences | None,
) -> ModelCheck:
    began = time.monotonic()
    try:
        text = text_tokens(tokenizer_file)
        check = ModelCheck(model, shapes, max_model_len, text, references)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"model type {model.config.model_type!r}: {error}") from error
    log.info("the model's own rounding measured", seconds=round(time.monotonic() - began, 1))
    return check


def _check_attention(
    model: RaggedModel,
    check: ModelCheck,
    backend: AttentionBackend,
    allocator: Allocator,
    kv_dtype: torch.dtype,
) -> None:
    began = time.monotonic()
    try:
        result = check.attention(backend, allocator, kv_dtype)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"model type {model.config.model_type!r}: {error}") from error
    seconds = round(time.monotonic() - began, 1)
    log.info("attention agrees with the model's own", **result.for_log(), seconds=seconds)


def _buckets(
    settings: WorkerSettings,
    device: torch.device,
    backend: AttentionBackend,
) -> Buckets | None:
    """Sizes to capture CUDA graphs for; None: no graphs."""
    if device.type != "cuda" or settings.cuda_graphs == "off":
        return None
    if not backend.capturable:
        log.info("no CUDA graphs", because=f"attention backend {backend.name} cannot be captured")
        return None
    return Buckets(settings.max_num_batched_tokens, settings.max_num_sequences)


def _gpu_budget(
    settings: WorkerSettings, model: RaggedModel, profile: StepProfile, buckets: Buckets | None
) -> GpuBudget:
    """The GPU's memory budget, measured by a run of the largest step."""
    began = time.monotonic()
    tokens, sequences = settings.max_num_batched_tokens, settings.max_num_sequences
    step = measure_steps(profile, tokens, sequences, buckets, model.device)
    profile.close()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    budget = GpuBudget(
        total, total - free, model.weight_bytes, step, settings.gpu_memory_utilization
    )
    log.info(
        "memory measured",
        total_bytes=total,
        used_bytes=budget.used_bytes,
        weight_bytes=budget.weight_bytes,
        step_bytes=step.activation_bytes,
        graph_bytes=step.graph_bytes,
        pool_bytes=budget.pool_bytes,
        seconds=round(time.monotonic() - began, 1),
    )
    return budget
