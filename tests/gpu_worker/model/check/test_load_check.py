"""Models that the worker refuses, and the reasons that it gives."""

from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpu_worker.kv.allocation import PagedAllocator
from gpu_worker.model.check.deviation import CheckResult
from gpu_worker.model.check.load_check import ModelCheck
from gpu_worker.model.loader import choose_device, choose_dtype, context_length, load_model
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from kernels.interface import AttentionParams, LayerCache, RaggedBatch
from kernels.reference import ReferenceBackend
from shared.errors import ModelUnsupported, SettingsError
from tests.gpu_worker.conftest import MakeWorker, ModelPath
from tests.support.models import MAX_MODEL_LEN, SERVED, tiny_model

CPU = torch.device("cpu")


def check_attention(
    model: RaggedModel,
    backend: ReferenceBackend,
    block_size: int = 16,
    longest: int = MAX_MODEL_LEN,
) -> CheckResult:
    """Check paged attention of the model as it is."""
    check = ModelCheck(model, model.observe_layers(), longest)
    return check.attention(backend, PagedAllocator(block_size, CPU))


class Careless(ReferenceBackend):
    """A backend that ignores one parameter of a layer."""

    def __init__(self, overlooked: str) -> None:
        self._overlooked = overlooked

    def attend(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        values = {
            "scale": params.scale,
            "sliding_window": params.sliding_window,
            "softcap": params.softcap,
        }
        values[self._overlooked] = 1.0 if self._overlooked == "scale" else None
        super().attend(query, cache, batch, AttentionParams(**values), out)  # type: ignore[arg-type]


class Mistaken(ReferenceBackend):
    """A backend that computes some rows of the last layer wrongly, with their heads reversed.

    It changes only the last layer, so that no other row is wrong because of these.

    Args:
        where: the rows, or "scale".
        num_layers: of the model.
    """

    def __init__(self, where: str, num_layers: int) -> None:
        self._where = where
        self._layers = cycle(range(num_layers))
        self._last = num_layers - 1

    def attend(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        mistaken = next(self._layers) == self._last
        if mistaken and self._where == "scale":
            params = AttentionParams(4 * params.scale, params.sliding_window, params.softcap)
        super().attend(query, cache, batch, params, out)
        for row in self._rows(batch) if mistaken else ():
            out[row] = out[row].flip(0)

    def _rows(self, batch: RaggedBatch) -> list[int]:
        chunks = list(pairwise(batch.query_starts.tolist()))
        longer = [(a, b) for a, b in chunks if b - a > 1]
        if self._where == "alone":
            return [a for a, b in chunks if b - a == 1]
        if self._where == "first of chunks":
            return [a for a, _ in longer]
        if self._where == "last of chunks":
            return [b - 1 for _, b in longer]
        if self._where == "one sequence":
            return list(range(*chunks[-1]))
        return []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("falcon", "ALiBi"),
        ("mamba", "linear_attention"),
        ("t5", "encoder"),
        ("xmod", "ValueError: Input language unknown"),
    ],
)
def test_models_that_paged_attention_cannot_serve_are_refused(
    kind: str, why: str, make_worker: MakeWorker
) -> None:
    with pytest.raises(ModelUnsupported, match=f"{kind}.*{why}"):
        make_worker(kind)


def test_falcon_without_alibi_is_refused_because_its_attention_is_built_in(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"falcon.*built in"):
        _build("falcon", tmp_path, alibi=False)


def test_a_hybrid_whose_layers_all_attend_is_served(tmp_path: Path) -> None:
    assert _build("granitemoehybrid", tmp_path).model.max_model_len == MAX_MODEL_LEN
    mixed = ["linear_attention", "full_attention"]
    with pytest.raises(ModelUnsupported, match=r"granitemoehybrid.*linear_attention"):
        _build("granitemoehybrid", tmp_path, layer_types=mixed)


def test_a_llama_4_that_counts_positions_itself_is_refused(tmp_path: Path) -> None:
    assert _build("llama4_text", tmp_path).model.max_model_len == MAX_MODEL_LEN
    bare = [1, 0]
    with pytest.raises(ModelUnsupported, match=r"llama4_text.*counts itself"):
        _build("llama4_text", tmp_path, no_rope_layers=bare)
    assert _build("llama4_text", tmp_path, no_rope_layers=bare, attn_temperature_tuning=False)


def _build(kind: str, folder: Path, **changes: Any) -> Worker:
    path = tiny_model(kind, folder, **changes)
    return build_worker(WorkerSettings(model=str(path), device="cpu", num_blocks=8))


def failing(model: RaggedModel, error: Exception) -> RaggedModel:
    """The same model with a forward that fails."""

    def forward(*args: Any, **kwargs: Any) -> None:
        raise error

    model.model.forward = forward
    return model


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute 'to'"),
        IndexError("tuple index out of range"),
        KeyError("full_attention"),
        RuntimeError("the size of tensor a\nand where"),
        TypeError("got an unexpected keyword"),
        ValueError("no language"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_model_whose_forward_fails_is_refused_with_its_error(
    error: Exception, model_path: ModelPath
) -> None:
    model = load_model(WorkerSettings(model=str(model_path("llama"))), CPU)
    with pytest.raises(ModelUnsupported) as raised:
        failing(model, error).observe_layers()
    assert str(error).partition("\n")[0] in str(raised.value)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), torch.AcceleratorError("")])
def test_a_failure_of_the_device_does_not_refuse_the_model(
    error: Exception, model_path: ModelPath
) -> None:
    model = load_model(WorkerSettings(model=str(model_path("llama"))), CPU)
    with pytest.raises(type(error)):
        failing(model, error).observe_layers()


@pytest.mark.parametrize(
    ("kind", "overlooked"),
    [
        ("gemma2", "softcap"),
        ("gemma2", "sliding_window"),
        ("mistral", "sliding_window"),
        ("llama", "scale"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_that_overlook_something_fail_the_check(
    kind: str, overlooked: str, dtype: str, model_path: ModelPath
) -> None:
    settings = WorkerSettings(
        model=str(model_path(kind)), device="cpu", dtype=dtype, num_blocks=8, num_threads=1
    )
    with pytest.raises(ModelUnsupported, match=rf"{kind}.*deviate"):
        build_worker(settings, Careless(overlooked))


def test_a_long_window_is_narrowed_for_the_check_and_only_for_it(tmp_path: Path) -> None:
    path = tiny_model("mistral", tmp_path, sliding_window=400)
    model = load_model(WorkerSettings(model=str(path), dtype="float32"), CPU)
    assert check_attention(model, ReferenceBackend(), longest=512).num_tokens < 200
    with pytest.raises(ModelUnsupported, match="deviate"):
        check_attention(model, Careless("sliding_window"), longest=512)
    assert {shape.params.sliding_window for shape in model.observe_layers()} == {400}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("phimoe", {}),
        ("qwen2_moe", {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
@pytest.mark.parametrize("window", [44, 100, MAX_MODEL_LEN - 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_that_only_the_mask_has_is_refused(
    kind: str, changes: dict[str, Any], window: int, dtype: str, tmp_path: Path
) -> None:
    path = tiny_model(kind, tmp_path, sliding_window=window, use_sliding_window=True, **changes)
    settings = WorkerSettings(
        model=str(path), device="cpu", dtype=dtype, num_blocks=8, num_threads=1
    )
    with pytest.raises(ModelUnsupported, match=rf"{kind}.*deviate"):
        build_worker(settings)


@pytest.mark.parametrize("window", [MAX_MODEL_LEN, 131072])
def test_a_window_that_no_sequence_is_longer_than_is_served(window: int, tmp_path: Path) -> None:
    path = tiny_model("phimoe", tmp_path, sliding_window=window)
    worker = build_worker(
        WorkerSettings(model=str(path), device="cpu", num_blocks=8, num_threads=1)
    )
    assert worker.model.max_model_len == MAX_MODEL_LEN


@pytest.mark.parametrize("kind", SERVED)
def test_rounding_in_bfloat16_does_not_fail_the_check(kind: str, make_worker: MakeWorker) -> None:
    assert make_worker(kind, dtype="bfloat16").model.dtype == "bfloat16"


def test_experts_that_rounding_changes_do_not_fail_the_check(make_worker: MakeWorker) -> None:
    assert make_worker("phimoe", dtype="bfloat16", num_blocks=8).model.dtype == "bfloat16"


@pytest.mark.parametrize(
    "where", ["alone", "first of chunks", "last of chunks", "one sequence", "scale"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "phimoe"])
def test_rows_that_are_wrong_fail_the_check(
    kind: str, dtype: str, where: str, model_path: ModelPath
) -> None:
    model = load_model(WorkerSettings(model=str(model_path(kind)), dtype=dtype), CPU)
    last = len(model.observe_layers())
    assert check_attention(model, ReferenceBackend()).worst.passed
    with pytest.raises(ModelUnsupported, match=rf"decoder layer {last - 1} deviate"):
        check_attention(model, Mistaken(where, last))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "phimoe"])
def test_positions_that_start_with_the_batch_fail_the_check(
    kind: str, dtype: str, model_path: ModelPath
) -> None:
    model = load_model(WorkerSettings(model=str(model_path(kind)), dtype=dtype), CPU)
    own = model.model.forward

    def forward(**arguments: Any) -> Any:
        if "position_ids" in arguments:
            arguments["position_ids"] = torch.arange(arguments["input_ids"].shape[1])[None]
        return own(**arguments)

    model.model.forward = forward
    with pytest.raises(ModelUnsupported, match="deviate"):
        check_attention(model, ReferenceBackend())


@pytest.mark.parametrize("max_model_len", [2, 7, 24, 30])
def test_short_contexts_are_checked_too(max_model_len: int, make_worker: MakeWorker) -> None:
    assert make_worker("llama", max_model_len=max_model_len, num_blocks=8)


def test_geometry_is_what_the_layers_hand_in(model_path: ModelPath) -> None:
    model = load_model(WorkerSettings(model=str(model_path("qwen3")), dtype="float32"), CPU)
    shapes = model.observe_layers()
    assert [(shape.num_kv_heads, shape.head_dim) for shape in shapes] == [(2, 16), (2, 16)]
    assert shapes[0].bytes_per_token == 2 * 2 * 16 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_any_block_size_passes_the_check(
    block_size: int, dtype: str, model_path: ModelPath
) -> None:
    settings = WorkerSettings(
        model=str(model_path("gemma2")), dtype=dtype, block_size=block_size, num_blocks=8
    )
    assert build_worker(settings, ReferenceBackend()).model.dtype == dtype


def llama_config(**rope: Any) -> Any:
    return transformers.LlamaConfig(
        max_position_embeddings=1024, rope_parameters={"rope_theta": 1e4, **rope}
    )


def test_rope_that_depends_on_the_batch_is_kept_within_its_fixed_part() -> None:
    dynamic = llama_config(rope_type="dynamic", factor=4.0)
    assert context_length(dynamic, None) == 1024
    with pytest.raises(SettingsError, match=r"2048.*at most 1024.*dynamic"):
        context_length(dynamic, 2048)
    factors = [1.0] * 64
    longrope = llama_config(
        rope_type="longrope",
        short_factor=factors,
        long_factor=factors,
        original_max_position_embeddings=256,
    )
    assert context_length(longrope, None) == 256
    assert context_length(longrope, 100) == 100
    with pytest.raises(SettingsError, match=r"512.*at most 256.*longrope"):
        context_length(longrope, 512)


def test_context_is_the_models_own_or_shorter() -> None:
    assert context_length(llama_config(rope_type="default"), None) == 1024
    assert context_length(transformers.GPT2Config(n_positions=77), None) == 77
    with pytest.raises(SettingsError, match="--max-model-len=1025"):
        context_length(llama_config(rope_type="default"), 1025)


def test_settings_that_do_not_fit_are_refused(make_worker: MakeWorker, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--block-size=12"):
        make_worker("llama", block_size=12)
    with pytest.raises(SettingsError, match="--kv-memory-bytes=100"):
        make_worker("llama", num_blocks=None, kv_memory_bytes=100)
    with pytest.raises(SettingsError, match="--device='tpu0'"):
        make_worker("llama", device="tpu0")
    with pytest.raises(SettingsError, match="--dtype='float16'"):
        make_worker("llama", dtype="float16")
    with pytest.raises(ModelUnsupported, match="no such folder"):
        build_worker(WorkerSettings(model=str(tmp_path / "nothing")))
    with pytest.raises(ModelUnsupported, match=r"neither config\.json"):
        build_worker(WorkerSettings(model=str(tmp_path)))


def test_the_pool_takes_the_memory_it_was_given(make_worker: MakeWorker) -> None:
    worker = make_worker("llama", num_blocks=None, kv_memory_bytes=1_000_000)
    kv = worker.executor.limits.kv
    assert kv.bytes_per_block == 16 * 2 * 2 * 2 * 16 * 4
    assert kv.num_blocks == 1_000_000 // kv.bytes_per_block
    assert worker.pool_bytes <= 1_000_000
    automatic = make_worker("llama", num_blocks=None)
    assert automatic.executor.limits.kv.num_blocks == 256 * 512 // 16


def test_types_by_default_are_those_the_device_is_fast_with() -> None:
    assert choose_dtype(None, torch.float16, CPU) == torch.float32
    assert choose_dtype(None, torch.float32, CPU) == torch.float32
    assert choose_dtype(None, torch.float16, torch.device("cuda")) == torch.float16
    assert choose_dtype("bfloat16", torch.float32, CPU) == torch.bfloat16


def test_a_gpu_is_named_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [choose_device(wanted) for wanted in (None, "cuda", "cuda:1")]
    assert found == [torch.device("cuda", number) for number in (0, 0, 1)]
    with pytest.raises(SettingsError, match="there are 2 GPUs"):
        choose_device("cuda:2")
