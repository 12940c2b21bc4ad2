"""Layers compiled by torch: the same tokens, or an error with the reason."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from gpu_worker.model.torch_compiled import decoder_layers
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from shared.errors import SettingsError
from tests.gpu_worker.conftest import MakeWorker, ModelPath, prompt
from tests.gpu_worker.planner import Planner


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.filterwarnings("ignore")
def test_tokens_are_the_same(
    make_worker: MakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for compiled in (False, True):
        worker = make_worker("llama", block_size=8, layer_kernels="off", compile=compiled)
        planner = Planner(worker.executor)
        planner.admit(1, prompt(30))
        planner.admit(2, prompt(7, 2))
        planner.step(s1=30, s2=3)
        planner.step(s2=4)
        found.append([planner.run(2, 12)[:12], planner.run(1, 12)[:12]])
    torch.compiler.reset()
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_without_a_compiler_it_fails_with_the_reason(make_worker: MakeWorker) -> None:
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}),
        pytest.raises(SettingsError, match=r"no-such-compiler.*without --compile") as raised,
    ):
        make_worker("llama", layer_kernels="off", compile=True)
    torch.compiler.reset()
    assert raised.value.key == "--compile"


def test_compiled_layers_are_not_compiled_twice(model_path: ModelPath) -> None:
    settings = WorkerSettings(model=str(model_path("llama")), device="cpu", compile=True)
    with pytest.raises(SettingsError, match="--layer-kernels off") as raised:
        build_worker(settings)
    assert raised.value.key == "--compile"


def test_layers_are_found_by_the_attention_in_them() -> None:
    attention = [nn.Linear(2, 2), nn.Linear(2, 2)]
    layers = nn.ModuleList([nn.Sequential(attention[0], nn.ReLU()), nn.Sequential(attention[1])])
    model = nn.ModuleDict({"layers": layers, "others": nn.ModuleList([nn.Linear(2, 2)])})
    assert decoder_layers(model, attention) == list(layers)
