"""Models with wrong files: refused at once, with the reason."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gpu_worker.kv.pool_sizes import available_memory
from gpu_worker.model.hub import only_cached
from gpu_worker.model.loader import load_model
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from shared.errors import ModelUnsupported, SettingsError
from tests.gpu_worker.conftest import ModelPath
from tests.support.models import tiny_model

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(folder: Path, **settings: Any) -> RaggedModel:
    return load_model(WorkerSettings(model=str(folder), **settings), CPU)


def with_weights(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """A tiny Llama with changed tensors."""
    path = tiny_model("llama", folder)
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def with_config(folder: Path, **changes: Any) -> Path:
    """A tiny Llama whose configuration was changed after its weights were saved."""
    path = tiny_model("llama", folder)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def test_a_tensor_that_was_renamed_is_missing_and_left_over(tmp_path: Path) -> None:
    own, other = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.upp_proj.weight"

    def rename(tensors: Tensors) -> None:
        tensors[other] = tensors.pop(own)

    path = with_weights(tmp_path, rename)
    with pytest.raises(ModelUnsupported, match=rf"(?s)lack {own}.*has not, {other}"):
        load(path)


def test_layers_that_the_file_has_not_are_named(tmp_path: Path) -> None:
    path = with_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelUnsupported, match=r"lack model\.layers\.2\..* and \d+ more"):
        load(path)


def test_layers_that_the_configuration_has_not_are_named(tmp_path: Path) -> None:
    path = with_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(ModelUnsupported, match=r"configuration has not, model\.layers\.1\."):
        load(path)


@pytest.mark.parametrize("vocab_size", [4000, 5000])
def test_another_vocabulary_is_refused_with_both_shapes(vocab_size: int, tmp_path: Path) -> None:
    path = with_config(tmp_path, vocab_size=vocab_size)
    wanted = rf"embed_tokens\.weight \(\[4096, 64\] instead of \[{vocab_size}, 64\]\)"
    with pytest.raises(ModelUnsupported, match=wanted):
        load(path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_no_numbers_are_named(bad: float, dtype: str, tmp_path: Path) -> None:
    names = ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]

    def spoil(tensors: Tensors) -> None:
        for name in names:
            tensors[name].view(-1)[-1] = bad

    path = with_weights(tmp_path, spoil)
    with pytest.raises(ModelUnsupported, match=f"NaN or infinite values in {', '.join(names)};"):
        load(path, dtype=dtype)


def test_large_weights_are_numbers(tmp_path: Path) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors["model.norm.weight"][:] = 3e38  # their sum is infinite

    load(with_weights(tmp_path, enlarge))


def test_tied_weights_and_saved_buffers_do_not_matter(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, tie_word_embeddings=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, file, metadata={"format": "pt"})
    load(path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match=r"no file named model\.safetensors"):
        load(path)


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.5])
def test_a_truncated_file_is_refused(share: float, tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ModelUnsupported, match="damaged or incomplete"):
        load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": 3}', '{"model_type": "none"}'])
def test_a_configuration_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path)
    (path / "config.json").write_text(text)
    with pytest.raises(ModelUnsupported, match=str(path)):
        load(path)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": "large"}, {"num_attention_heads": 0}, {"vocab_size": -1}]
)
def test_fields_that_cannot_be_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported):
        load(with_config(tmp_path, **changes))


def test_files_are_refused_with_what_to_give_instead(tmp_path: Path, model_path: ModelPath) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelUnsupported, match=r"has neither config\.json nor a GGUF file"):
        load(empty)
    folder = model_path("llama")
    with pytest.raises(ModelUnsupported, match=f"give its folder: --model {folder}"):
        load(folder / "model.safetensors")


def test_encoders_are_refused_as_such(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelUnsupported, match=r"'bert' is an encoder: .* causal language model"):
        load(tmp_path / "bert")


def test_a_hub_that_cannot_be_reached_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(ModelUnsupported, match=r"a/b: there is no such folder.*cannot be reached"):
        only_cached("a/b")


def test_a_pool_larger_than_memory_is_refused(model_path: ModelPath) -> None:
    path, left = str(model_path("llama")), available_memory()
    most = 4 * left
    for settings, key in (
        ({"num_blocks": most // 8192}, "--num-blocks"),
        ({"kv_memory_bytes": most}, "--kv-memory-bytes"),
    ):
        with pytest.raises(SettingsError, match=rf"{key}=\d+: the pool would take"):
            build_worker(WorkerSettings(model=path, device="cpu", dtype="float32", **settings))  # type: ignore[arg-type]
