"""Loads the model that the settings name, and refuses models that cannot be served."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from gpu_worker.model.attention import ATTENTION_NAME, register_attention
from gpu_worker.model.download import download
from gpu_worker.model.hub import only_cached
from gpu_worker.model.memory_limit import memory_limit, refuse_too_large
from gpu_worker.model.quantization.checkpoint_format import CheckpointFormat
from gpu_worker.model.quantization.formats import take_format
from gpu_worker.model.quantization.gguf_checkpoint import GgufCheckpoint
from gpu_worker.model.quantization.input_rounding import round_inputs
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from gpu_worker.model.quantization.quantized_loading import StoredFormat, complete
from gpu_worker.model.quantization.requested_format import apply_quantization, check_device
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.model.split.split_loading import SplitModel
from gpu_worker.model.weight_files import refuse_broken, refuse_other_tensors, stored_bytes
from gpu_worker.ranks.ranks import Ranks
from gpu_worker.settings import WorkerSettings
from shared.errors import ModelUnsupported, SettingsError
from shared.gguf.location import gguf_file_of
from shared.logs import EventLog

# Attention layers, by the names in transformers' ``layer_types``.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Models with ALiBi, not all of which have a field for it in their configuration.
_ALIBI_TYPES = {"bloom", "mpt"}
# Rotary embeddings whose frequencies depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Errors of configurations and models that are made from impossible fields.
_BAD_FIELDS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

log = EventLog(__name__)


def load_model(
    settings: WorkerSettings, device: torch.device, ranks: Ranks | None = None
) -> RaggedModel:
    """Load the model with paged attention, or this rank's part of it; it is not checked yet.

    Raises:
        ModelUnsupported: there is no such model, or its configuration is not supported.
        SettingsError: a setting does not fit the model.
    """
    check_device(settings.quantization, device)
    register_attention()
    transformers.logging.disable_progress_bar()
    file = gguf_file_of(settings.model)
    if file is None:
        _check_path(settings.model)
    if ranks is not None and file is not None:
        reason = "GGUF files are not split over workers; use --tensor-parallel-size 1"
        raise ModelUnsupported(f"{settings.model}: {reason}")
    from_cache = not Path(settings.model).exists() and only_cached(settings.model)
    gguf = None if file is None else GgufCheckpoint(file)
    config = _load_config(settings, from_cache) if gguf is None else gguf.config
    refuse_by_config(config)
    checkpoint = gguf or take_format(settings.model, config)
    if not from_cache:
        download(settings.model)
    dtype = choose_dtype(settings.dtype, own_dtype(config), device)
    # Files are mapped: a GPU or quantized layers take the weights from them one at a time.
    if device.type == "cpu" and ranks is None and not checkpoint and not settings.quantization:
        needed = stored_bytes(settings.model) * dtype.itemsize // own_dtype(config).itemsize
        refuse_too_large(settings.model, needed, memory_limit())
    log.info("loading model", model=settings.model, type=config.model_type, dtype=dtype)
    model, found = _load_weights(settings, config, dtype, from_cache, checkpoint, ranks)
    refuse_other_tensors(settings.model, found)
    if checkpoint is not None:
        if ranks is None:
            complete(settings.model, model)
        layers = sum(isinstance(module, QuantizedLinear) for module in model.modules())
        log.info("weights are quantized", format=checkpoint.name, layers=layers)
    if gguf is not None:
        gguf.finish(model)
    # The classes of hybrid models have this mark even if all of their layers are attention.
    if getattr(model, "_is_stateful", False) and not _layer_types(config):
        raise ModelUnsupported(
            f"model type {config.model_type!r} keeps state other than keys and values"
        )
    model = model.to(device).eval().requires_grad_(False)
    refuse_broken(settings.model, model)
    weight_format = apply_quantization(model, settings.quantization)
    # Parts of a model are compared with whole layers, which round no inputs.
    if settings.layer_kernels != "off" and ranks is None:
        round_inputs(model, dtype, device)
    return RaggedModel(model, weight_format)


def _load_weights(
    settings: WorkerSettings,
    config: Any,
    dtype: torch.dtype,
    from_cache: bool,
    checkpoint: CheckpointFormat | None,
    ranks: Ranks | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report on the tensors in its files."""
    name = f"model type {config.model_type!r}"
    arguments: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # refuse_other_tensors names them
    }
    if checkpoint is not None:
        arguments["quantization_config"] = StoredFormat(checkpoint)
    try:
        if ranks is not None:
            return _load_part(settings, config, dtype, checkpoint, ranks)
        if isinstance(checkpoint, GgufCheckpoint):
            return checkpoint.load(dtype, arguments)
        model, found = AutoModelForCausalLM.from_pretrained(
            settings.model,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=from_cache,
            **arguments,
        )
    except SafetensorError as error:
        reason = f"{settings.model}: a file of weights is damaged or incomplete ({error})"
        raise ModelUnsupported(f"{reason}; copy or download it again") from error
    except OSError as error:
        if not Path(settings.model).is_dir():  # a failure of the hub may be temporary
            raise
        raise ModelUnsupported(f"{settings.model}: {_first_sentence(error)}") from error
    except torch.OutOfMemoryError:
        raise
    except _BAD_FIELDS as error:
        if ATTENTION_NAME in str(error):  # transformers or the model refuses the function
            raise ModelUnsupported(f"{name}: its attention is built in") from error
        if "Unrecognized configuration" in str(error):
            raise ModelUnsupported(f"{name} is no causal language model") from error
        if "allocate" in str(error):  # the machine's memory, not the model
            raise
        why = f"no model can be made of its config.json: {_named(error)}"
        raise ModelUnsupported(f"{settings.model}: {why}") from error
    return model, found


def _load_part(
    settings: WorkerSettings,
    config: Any,
    dtype: torch.dtype,
    checkpoint: CheckpointFormat | None,
    ranks: Ranks,
) -> tuple[Any, dict[str, Any]]:
    """This rank's part of the model, and the same report."""
    trusted = settings.trust_remote_code
    split = SplitModel(settings.model, config, dtype, ranks.member, trusted, checkpoint)
    refuse_too_large(settings.model, split.weight_bytes(), memory_limit())
    report = split.load()
    split.add_sums(ranks.reducer)
    return split.model, report


def stored_format(settings: WorkerSettings) -> CheckpointFormat | None:
    """The format of the quantized weights of a model that has been loaded; None: it has none."""
    return take_format(settings.model, _load_config(settings, from_cache=True))


def _load_config(settings: WorkerSettings, from_cache: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(
            settings.model,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=from_cache,
        )
    except OSError as error:  # also: the hub cannot be reached, which may be temporary
        if "valid model identifier" in str(error):
            reason = f"{settings.model}: neither a folder nor a model on the hub"
            raise ModelUnsupported(reason) from error
        if Path(settings.model).is_dir():
            raise ModelUnsupported(f"{settings.model}: {_first_sentence(error)}") from error
        raise
    except _BAD_FIELDS as error:  # also: a model type unknown to transformers, remote code
        why = f"its config.json cannot be used: {_named(error)}"
        raise ModelUnsupported(f"{settings.model}: {why}") from error


def _named(error: Exception) -> str:
    """The error's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0]


def refuse_by_config(config: Any) -> None:
    """Refuse models that are known not to work, before their weights are read.

    Raises:
        ModelUnsupported: with the reason.
    """
    text = config.get_text_config()
    name = f"model type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise ModelUnsupported(f"{name} has an encoder; only decoders are served")
    if _is_encoder(config):
        raise ModelUnsupported(
            f"{name} is an encoder: it reads text and generates none; give a causal language model"
        )
    if getattr(text, "alibi", False) or config.model_type in _ALIBI_TYPES:
        raise ModelUnsupported(f"{name} uses ALiBi position biases, which are not supported")
    foreign = _layer_types(config) - _ATTENTION_LAYERS
    if foreign:
        raise ModelUnsupported(f"{name} has layers of type {', '.join(sorted(foreign))}")
    # In layers without rotary embeddings Llama 4 scales queries by position, which it counts from
    # the start of the batch. It does so after thousands of tokens, where no check at load gets.
    bare = 0 in (getattr(text, "no_rope_layers", None) or ())
    if bare and getattr(text, "attn_temperature_tuning", False):
        raise ModelUnsupported(f"{name} scales attention by positions that it counts itself")


def _is_encoder(config: Any) -> bool:
    """Whether the model is of a family of encoders, and not configured as a decoder."""
    kind = config.model_type
    if kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return False
    return kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or not getattr(config, "is_decoder", True)


def _layer_types(config: Any) -> set[str]:
    """The types of layers in the configuration; empty if it lists none."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ())


def context_length(config: Any, wanted: int | None) -> int:
    """Longest sequence in tokens, prompt and output together.

    Raises:
        SettingsError: ``wanted`` is more than the model supports.
    """
    limit, why = _longest_context(config)
    if limit is None:
        if wanted is None:
            raise SettingsError(
                "--max-model-len", "auto", "its config.json has no limit; give a number"
            )
        return wanted
    if wanted is None:
        if why:
            log.warning("context is shorter than the model's own", tokens=limit, because=why)
        return limit
    if wanted > limit:
        reason = f"must be at most {limit}, " + (why or "which is the model's own")
        raise SettingsError("--max-model-len", wanted, reason)
    return wanted


def _longest_context(config: Any) -> tuple[int | None, str]:
    """The longest context in tokens, and why it is less than the model's own ("" if it is not)."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        if kind not in _BATCH_DEPENDENT_ROPE:
            continue
        limit = rope.get("original_max_position_embeddings") or own
        limit = getattr(config, "original_max_position_embeddings", None) or limit
        if kind == "dynamic" or (own is not None and limit is not None and limit < own):
            why = (
                f"beyond {limit} tokens {kind} rotary embeddings depend on the longest sequence "
                "of the batch"
            )
            return limit, why
    return own, ""


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Parameters of rotary embeddings: one entry, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found:
        return [found]
    return [value for value in found.values() if isinstance(value, dict)]


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Tokens that end a sequence, from the model's generation config or its config."""
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def choose_device(wanted: str | None, rank: int = 0) -> torch.device:
    """The wanted device, else a GPU if there is one, another one for each rank of a machine.

    GPUs have their index.

    Raises:
        SettingsError: there is no such device.
    """
    if wanted is None:
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        wanted = f"cuda:{rank % num_gpus}" if num_gpus else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise SettingsError("--device", wanted, "expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingsError("--device", wanted, "expected cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    index = device.index or 0  # torch.cuda.set_device needs an index
    if index >= torch.cuda.device_count():
        raise SettingsError("--device", wanted, f"there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def choose_dtype(wanted: str | None, own: torch.dtype, device: torch.device) -> torch.dtype:
    """Type of weights and KV cache; by default the model's own if the device is fast with it.

    A CPU without bfloat16 instructions takes float32. Its fused layers still keep bfloat16 weights
    packed (see cpu_fusion), so that they read no more bytes; and recomputation gives equal texts.

    Raises:
        SettingsError: the device does not support the wanted type.
    """
    if wanted is not None:
        dtype: torch.dtype = getattr(torch, wanted)
        if dtype == torch.float16 and device.type == "cpu":
            raise SettingsError("--dtype", wanted, "is not supported on CPUs; take float32")
        return dtype
    if device.type != "cpu":
        return own
    return torch.bfloat16 if own == torch.bfloat16 and _cpu_is_fast_with_bf16() else torch.float32


def own_dtype(config: Any) -> torch.dtype:
    """Type of the weights in the model's files."""
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _cpu_is_fast_with_bf16() -> bool:
    """Whether the CPU has instructions that multiply bf16."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def _check_path(model: str) -> None:
    """Refuse folders that are missing or incomplete; transformers checks hub ids."""
    if Path(model).is_file():
        raise ModelUnsupported(f"{model}: {_meaning_of_file(model)}")
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ModelUnsupported(f"{model}: the folder has neither config.json nor a GGUF file")
        return
    if model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise ModelUnsupported(f"{model}: there is no such folder")


def _meaning_of_file(model: str) -> str:
    folder = Path(model).resolve().parent
    if (folder / "config.json").is_file():
        return f"this is a file; give its folder: --model {folder}"
    return "this is a file; give the folder that has it together with config.json"
