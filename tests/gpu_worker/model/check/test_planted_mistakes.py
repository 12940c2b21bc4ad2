"""Planted bugs that the check at load has to find, in random models and in a trained one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from gpu_worker.kv.allocation import PagedAllocator
from gpu_worker.model.check.deviation import CheckResult
from gpu_worker.model.check.load_check import ModelCheck
from gpu_worker.model.check.tokens import text_tokens
from gpu_worker.model.check.watched_layers import WatchedLayers
from gpu_worker.model.fusion.cpu_fusion import fuse
from gpu_worker.model.loader import load_model
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.model.tokenizer_file import TokenizerFile
from gpu_worker.settings import WorkerSettings
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.instruction_set import Dot, Instructions, choose, detect
from kernels.interface import AttentionBackend, AttentionParams, LayerCache, RaggedBatch
from kernels.select import select_backend
from shared.errors import ModelUnsupported
from tests.gpu_worker.conftest import ModelPath
from tests.support.real_model import real_model_or_skip

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")

CPU = torch.device("cpu")
INSTEAD = "--layer-kernels off serves it with torch's"
MAX_MODEL_LEN = 512
# Rounds like the instruction of avx512_bf16; subnormal numbers and sums of pairs show it.
AS_AVX512_BF16 = Instructions("as avx512_bf16", wide=True, dot=Dot.EMULATED)


@dataclass(frozen=True)
class Checked:
    """A model with its check, made before its layers were fused."""

    model: RaggedModel
    check: ModelCheck
    backend: AttentionBackend
    layers: list[nn.Module]

    def attention(self, backend: AttentionBackend | None = None) -> CheckResult:
        return self.check.attention(backend or self.backend, PagedAllocator(16, CPU))


def checked(path: str, dtype: str, instructions: Instructions) -> Checked:
    model = load_model(WorkerSettings(model=path, dtype=dtype), CPU)
    shapes = model.observe_layers()
    attention = [shape.module for shape in shapes]
    check = ModelCheck(model, shapes, MAX_MODEL_LEN, text_tokens(TokenizerFile(str(path))))
    fuse(model.model, CpuLayers(instructions), model.dtype, attention)
    backend = select_backend(None, "cpu", model.dtype, False)
    return Checked(model, check, backend, WatchedLayers(model.model, attention).layers)


@pytest.fixture(
    scope="module",
    params=["llama float32", "llama bfloat16", "gemma2 bfloat16", "real bfloat16"],
)
def subject(request: pytest.FixtureRequest, model_path: ModelPath) -> Checked:
    """A model with fused layers."""
    kind, dtype = request.param.split()
    path = real_model_or_skip() if kind == "real" else model_path(kind)
    instructions = detect()
    assert instructions is not None
    if kind == "real" and instructions.wide and instructions.dot != Dot.NATIVE:
        instructions = AS_AVX512_BF16
    return checked(str(path), dtype, instructions)


def test_a_model_without_mistakes_passes(subject: Checked) -> None:
    for result in (subject.check.layers(INSTEAD), subject.attention()):
        assert result.worst.passed
        assert result.worst.severity < 0.8  # passes with a margin
        assert result.error <= max(1.5 * result.own_error, 1e-4)


class Faulty:
    """A backend with a bug in one layer.

    Args:
        subject: has the correct backend.
        mistake: attends instead of it, in that layer.
    """

    name = "faulty"
    capturable = False

    def __init__(self, subject: Checked, mistake: "Mistake") -> None:
        self._own = subject.backend
        self._mistake = mistake
        self.wrong = len(subject.layers) // 2
        self._layers = cycle(range(len(subject.layers)))

    def narrow_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return self._own.narrow_dtypes(dtype)

    def write_kv(self, *arguments: Any) -> None:
        self._own.write_kv(*arguments)

    def attend(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        attend = self._own.attend
        if next(self._layers) != self.wrong:
            attend(query, cache, batch, params, out)
            return
        self._mistake(attend, query, cache, batch, params, out)


Mistake = Callable[..., None]


def swapped_heads(attend: Any, query: Any, cache: Any, batch: Any, params: Any, out: Any) -> None:
    attend(query, cache, batch, params, out)
    out[:, [0, -1]] = out[:, [-1, 0]]


def missing_scale(attend: Any, query: Any, cache: Any, batch: Any, params: Any, out: Any) -> None:
    attend(query, cache, batch, replace(params, scale=1.0), out)


def rough_scale(attend: Any, query: Any, cache: Any, batch: Any, params: Any, out: Any) -> None:
    attend(query, cache, batch, replace(params, scale=1.1 * params.scale), out)


def stale_block(attend: Any, query: Any, cache: Any, batch: Any, params: Any, out: Any) -> None:
    tables = batch.block_tables.clone()
    tables[:, 1] = tables[:, 0]  # as if the second block had not been allocated yet
    attend(query, cache, replace(batch, block_tables=tables), params, out)


def short_context(attend: Any, query: Any, cache: Any, batch: Any, params: Any, out: Any) -> None:
    """Decodes do not attend to their own token."""
    attend(query, cache, batch, params, out)
    lone = (batch.query_starts.diff() == 1) & (batch.context_lens > 1)
    if bool(lone.any()):
        shorter = replace(batch, context_lens=batch.context_lens - lone.int())
        wrong = torch.empty_like(out)
        attend(query, cache, shorter, params, wrong)
        rows = batch.query_starts[:-1][lone].long()
        out[rows] = wrong[rows]


@pytest.mark.parametrize(
    "mistake", [swapped_heads, missing_scale, rough_scale, stale_block, short_context]
)
def test_a_mistake_of_attention_in_one_layer_is_refused_and_the_layer_named(
    subject: Checked, mistake: Mistake
) -> None:
    faulty = Faulty(subject, mistake)
    with pytest.raises(ModelUnsupported, match=rf"decoder layer {faulty.wrong} deviate"):
        subject.attention(faulty)


def test_a_wrong_position_is_refused(subject: Checked) -> None:
    own = subject.model.model.forward

    def forward(**arguments: Any) -> Any:
        if "position_ids" in arguments:
            positions = arguments["position_ids"].clone()
            positions[:, -1] += 1
            arguments["position_ids"] = positions
        return own(**arguments)

    subject.model.model.forward = forward
    try:
        with pytest.raises(ModelUnsupported, match=r"with paged attention.*deviate"):
            subject.attention()
    finally:
        subject.model.model.forward = own


@contextmanager
def replaced(parent: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    own = getattr(parent, name)
    setattr(parent, name, module)
    try:
        yield
    finally:
        setattr(parent, name, own)


class WithEpsilon(nn.Module):
    """An RMS norm with another epsilon."""

    def __init__(self, own: Any, epsilon: float) -> None:
        super().__init__()
        self._weight, self._epsilon = own.weight, epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = (wide.pow(2).mean(-1, keepdim=True) + self._epsilon).rsqrt()
        return (wide * scale * self._weight).to(x.dtype)


def test_a_norms_epsilon_is_refused_where_it_matters(subject: Checked) -> None:
    layer = subject.layers[0]
    norm: Any = layer.input_layernorm
    epsilon = subject.model.config.rms_norm_eps
    with replaced(layer, "input_layernorm", WithEpsilon(norm, epsilon)):
        assert subject.check.layers(INSTEAD).worst.passed
    # A trained model's embeddings are small. Gemma 2 normalizes the output of attention again, so
    # that an epsilon before it changes hardly anything.
    large = 100 * epsilon if subject.model.num_parameters > 1e8 else 0.1
    if subject.model.config.model_type == "gemma2":
        large = 30.0
    with (
        replaced(layer, "input_layernorm", WithEpsilon(norm, large)),
        pytest.raises(ModelUnsupported, match=rf"decoder layer 0 deviate.*{INSTEAD}"),
    ):
        subject.check.layers(INSTEAD)


def test_a_weight_that_was_packed_wrongly_is_refused(subject: Checked) -> None:
    layer: Any = subject.layers[-1]
    own = layer.mlp.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = own(x)
        out[..., :16] = out[..., 16:32].clone()
        return out

    layer.mlp.forward = forward
    try:
        last = len(subject.layers) - 1
        with pytest.raises(ModelUnsupported, match=rf"decoder layer {last} deviate.*{INSTEAD}"):
            subject.check.layers(INSTEAD)
    finally:
        layer.mlp.forward = own


@pytest.mark.parametrize("features", [{"avx2", "fma"}, {"avx512f"}])
def test_the_real_model_passes_with_every_kind_of_instructions(features: set[str]) -> None:
    instructions = choose(features)
    found = detect()
    assert instructions is not None
    assert found is not None
    if instructions.wide and not found.wide:
        pytest.skip("this CPU has shorter vectors")
    subject = checked(str(real_model_or_skip()), "float32", instructions)
    assert subject.check.layers(INSTEAD).worst.severity < 0.5
    assert subject.attention().worst.severity < 0.5
