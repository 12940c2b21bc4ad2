"""KV caches of other types than the model's: what they take, what is served, what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_worker.kv.cache_types import stored_shapes
from gpu_worker.model.ragged_model import LayerShape
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from kernels.interface import FP8, AttentionBackend, AttentionParams, LayerCache, RaggedBatch
from kernels.reference import ReferenceBackend
from kernels.select import select_backend
from shared.errors import ModelUnsupported, SettingsError
from shared.metrics import WorkerMetrics
from tests.gpu_worker.conftest import MakeWorker, ModelPath
from tests.gpu_worker.kv.test_virtual_memory import mixed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kv_dtype", "row_bytes"), [(None, 64), ("float32", 64), ("bfloat16", 32), ("int8", 20)]
)
@pytest.mark.parametrize("kv_memory", ["paged", "virtual"])
def test_blocks_take_what_their_type_takes(
    kv_dtype: str | None, row_bytes: int, kv_memory: str, make_worker: MakeWorker
) -> None:
    worker = make_worker("llama", kv_dtype=kv_dtype, kv_memory=kv_memory, block_size=256)
    kv = worker.executor.limits.kv
    assert kv.dtype == (kv_dtype or "float32")
    assert kv.bytes_per_block == 256 * 2 * 2 * 2 * row_bytes  # two layers, two KV heads
    assert worker.pool_bytes == kv.num_blocks * kv.bytes_per_block


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "reference"},
        {"kv_memory": "virtual", "block_size": 256},
        {"kv_layout": "block_major"},
        {"layer_kernels": "off"},
    ],
    ids=str,
)
def test_tokens_are_the_same_however_the_cache_is_laid_out_and_read(
    kv_dtype: str, settings: dict[str, Any], make_worker: MakeWorker
) -> None:
    block_size = settings.get("block_size", 16)
    plain = make_worker("llama", kv_dtype=kv_dtype, block_size=block_size).executor
    other = make_worker("llama", kv_dtype=kv_dtype, **settings).executor
    assert mixed(other) == mixed(plain)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phimoe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rounding_of_keys_and_values_does_not_fail_the_check(
    kind: str, dtype: str, make_worker: MakeWorker
) -> None:
    worker = make_worker(kind, dtype=dtype, kv_dtype="int8")
    assert worker.model.dtype == dtype
    assert worker.executor.limits.kv.dtype == "int8"


class Careless(ReferenceBackend):
    """A backend that mistakes the scales of some tokens."""

    def attend(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        if cache.value_scales is not None:
            cache = replace(cache, value_scales=cache.value_scales.roll(1, dims=2))
        super().attend(query, cache, batch, params, out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_that_mistake_scales_fail_the_check(dtype: str, model_path: ModelPath) -> None:
    settings = WorkerSettings(
        model=str(model_path("llama")),
        device="cpu",
        dtype=dtype,
        kv_dtype="int8",
        num_blocks=8,
        num_threads=1,
    )
    with pytest.raises(ModelUnsupported, match=r"llama.*with a KV cache of int8 .* deviate"):
        build_worker(settings, Careless())


def shapes(dtype: torch.dtype, head_dim: int = 64) -> list[LayerShape]:
    return [LayerShape(torch.nn.Identity(), 2, head_dim, dtype, AttentionParams(1.0))]


@pytest.mark.parametrize(
    ("wanted", "dtype", "backend", "reason"),
    [
        ("fp8", torch.bfloat16, "cpu", "'cpu' reads no such cache .* it reads bfloat16, int8"),
        ("float16", torch.float32, "cpu", "it reads float32, bfloat16, int8"),
        ("int8", torch.bfloat16, "sdpa", "'sdpa' reads no such cache"),
        ("float32", torch.bfloat16, "cpu", "computed in bfloat16: .* or narrower"),
        ("float16", torch.bfloat16, "reference", "computed in bfloat16: .* or narrower"),
    ],
)
def test_types_that_are_not_possible_are_refused_with_those_that_are(
    wanted: str, dtype: torch.dtype, backend: str, reason: str
) -> None:
    attention: AttentionBackend = select_backend(backend, "cpu", dtype)
    with pytest.raises(SettingsError, match=f"--kv-dtype='{wanted}': .*{reason}"):
        stored_shapes(shapes(dtype), wanted, CPU, attention)


def test_heads_whose_scales_would_not_be_aligned_are_refused() -> None:
    with pytest.raises(SettingsError, match="heads of 6 elements are no multiple of 4"):
        stored_shapes(shapes(torch.float32, 6), "int8", CPU, ReferenceBackend())


def test_a_gpu_without_8_bit_floats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, backend = torch.device("cuda", 0), ReferenceBackend()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    [stored] = stored_shapes(shapes(torch.bfloat16), "fp8", gpu, backend)
    assert stored.dtype == FP8
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(SettingsError, match=r"compute capability 8\.0, has no 8-bit floats; int8"):
        stored_shapes(shapes(torch.bfloat16), "fp8", gpu, backend)


def test_metrics_name_the_type() -> None:
    metrics = WorkerMetrics("m", "e")
    metrics.describe_kv("int8", 4096)
    text = metrics.render().decode()
    [line] = [line for line in text.splitlines() if line.startswith("pagestream:worker_kv_dtype{")]
    assert 'dtype="int8"' in line
    assert line.endswith(" 1.0")
