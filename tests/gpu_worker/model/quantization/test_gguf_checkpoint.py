"""Models in GGUF files compute what transformers computes with their dequantized weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from gpu_worker.model.loader import load_model
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from shared.errors import ModelUnsupported
from shared.gguf.header import read_header
from tests.gpu_worker.conftest import poison, prompt
from tests.gpu_worker.planner import Planner
from tests.gpu_worker.test_tokens_equal_generate import generate
from tests.support.gguf_files import F32, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0, write_gguf

CPU = torch.device("cpu")
# As llama.cpp mixes them for Q4_K_M, and the types that it falls back to.
Q4_K_M = {
    "attn_v": Q6_K,
    "attn_k": Q5_K,
    "attn_output": Q5_0,
    "ffn_down": Q6_K,
    "norm": F32,
    "token_embd": Q8_0,
    "output": Q6_K,
    "": Q4_K,
}
ALL_Q8_0 = {"norm": F32, "": Q8_0}


def llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def load(path: Path, dtype: str = "float32") -> RaggedModel:
    return load_model(WorkerSettings(model=str(path), dtype=dtype), CPU)


@pytest.mark.parametrize("kinds", [ALL_Q8_0, Q4_K_M], ids=["Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_logits_are_those_of_the_dequantized_weights(
    kinds: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    reference = llama(tie_word_embeddings=tied)
    found = load(write_gguf(tmp_path / "model.gguf", reference, kinds))
    layers = [each for each in found.model.modules() if isinstance(each, QuantizedLinear)]
    assert len(layers) == 2 * 7 + 1  # the output layer as well, tied or not
    tokens = torch.tensor(prompt(40)) % 512
    expected = reference(tokens.unsqueeze(0)).logits[0]
    torch.testing.assert_close(found.eager_logits(tokens), expected, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_those_of_generate(tmp_path: Path) -> None:
    reference = llama()
    path = write_gguf(tmp_path / "model.gguf", reference, Q4_K_M)
    settings = WorkerSettings(
        model=str(path), dtype="float32", device="cpu", num_blocks=64, num_threads=1
    )
    worker = build_worker(settings)
    poison(worker.executor)
    planner = Planner(worker.executor)
    tokens = [token % 512 for token in prompt(30)]
    planner.admit(1, tokens)
    planner.step(s1=30)
    assert planner.run(1, 16)[:16] == generate(reference, tokens, 16)


def test_matrices_that_are_not_quantized_stay_as_they_are(tmp_path: Path) -> None:
    reference = llama()
    found = load(write_gguf(tmp_path / "model.gguf", reference, {}))
    tokens = torch.tensor(prompt(20)) % 512
    with torch.inference_mode():
        expected = reference(tokens.unsqueeze(0)).logits[0]
        torch.testing.assert_close(found.eager_logits(tokens), expected, rtol=1e-4, atol=1e-4)


def test_factors_of_rotary_frequencies_divide_them(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    reference = llama()
    own = reference.model.rotary_emb.inv_freq
    found = load(write_gguf(tmp_path / "model.gguf", reference, ALL_Q8_0, change=add))
    expected = own / torch.from_numpy(factors)
    assert torch.equal(found.model.model.rotary_emb.inv_freq, expected)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", llama(), ALL_Q8_0)
    assert load(tmp_path, "bfloat16").dtype == torch.bfloat16
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelUnsupported, match=r"several GGUF files; give one of a\.gguf, b\.gguf"):
        load(tmp_path)


def test_a_window_of_no_tokens_is_none(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(0)

    path = write_gguf(tmp_path / "model.gguf", llama(), ALL_Q8_0, change=add)
    assert getattr(load(path).config, "sliding_window", None) is None


def _metadata(key: str, value: str) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_string(key, value)


def _experts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(8)


def _surplus(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(256, np.float32))
    writer.add_tensor("blk.0.attn_rot_embd.weight", np.zeros(4, np.float32))


def _foreign_type(writer: gguf.GGUFWriter) -> None:
    kind = gguf.GGMLQuantizationType.IQ3_S
    writer.add_tensor("extra", np.zeros((1, 110), np.uint8), raw_dtype=kind)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_metadata("llama.rope.scaling.type", "yarn"), r"llama\.rope\.scaling\.type='yarn'"),
        (_experts, r"llama\.expert_count=8 is not served"),
        (_surplus, r"has not, blk\.0\.attn_q\.bias, blk\.0\.attn_rot_embd\.weight"),
        (_foreign_type, r"extra has the type IQ3_S \(21\), which is not served; served are F32"),
    ],
)
def test_what_is_not_served_is_named(
    change: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", llama(), ALL_Q8_0, change=change)
    with pytest.raises(ModelUnsupported, match=message):
        load(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    left_out = ("blk.1.ffn_up.weight", "output_norm.weight")
    path = write_gguf(tmp_path / "model.gguf", llama(), ALL_Q8_0, leave_out=left_out)
    with pytest.raises(ModelUnsupported, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight, mod"):
        load(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(128, 256)
    path = write_gguf(tmp_path / "model.gguf", model, ALL_Q8_0)
    with pytest.raises(ModelUnsupported, match=r"other shapes .*up_proj\.weight \(\[128, 272\]"):
        load(path)


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", llama(), ALL_Q8_0)
    with path.open("r+b") as file:
        file.seek(read_header(path).tensors["blk.1.attn_v.weight"].offset)
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(ModelUnsupported, match=r"NaN or infinite values in .*v_proj\.scales"):
        load(path)


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", llama(), ALL_Q8_0)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelUnsupported, match=r"the file is incomplete: it has .* bytes, and"):
        load(path)


def test_an_architecture_that_is_not_mapped_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"general\.architecture='mamba' is not served"):
        load(tmp_path / "model.gguf")
