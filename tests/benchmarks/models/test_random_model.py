"""The random model can be read by servers, and is the same for the same seed."""

from pathlib import Path

import torch
import transformers

from benchmarks.models.random_model import SHAPES, make_tokenizer, write_model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_the_same_seed_gives_the_same_model_and_another_another(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, SHAPES["tiny"], torch.bfloat16, seed)
    first, same, other = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["lm_head.weight"].dtype == torch.bfloat16


def test_its_tokenizer_has_every_token_and_encodes_every_text(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["tiny"], torch.bfloat16, seed=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == SHAPES["tiny"].vocabulary
    for text in ("ab cd", "späte Überraschung 🎉\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_beyond_the_bytes_are_text_of_their_own() -> None:
    tokenizer = make_tokenizer(32_000)
    assert tokenizer.get_vocab_size() == 32_000
    texts = {tokenizer.decode([number]) for number in range(300, 32_000)}
    assert len(texts) == 32_000 - 300
    assert all(text.isalnum() for text in texts)
