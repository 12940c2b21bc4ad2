"""The demo model that ships with the repository is complete, small and speaks English."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo"
MAX_BYTES = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        DEMO, local_files_only=True, dtype=torch.float32
    ).eval()


def mean_loss(model: Any, tokenizer: Any, text: str) -> float:
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def test_all_files_together_are_small_enough_for_the_repository() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= MAX_BYTES


def test_the_weights_are_bf16_and_the_heads_are_grouped(model: Any) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert model.config.num_attention_heads == 2 * model.config.num_key_value_heads


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading and trailing ",
        "tabs\tnew\r\nlines\n\n\n  and   runs of spaces",
        "naïve café — “quotes” … don't , spaced . punctuation !",
        "日本語と한국어 и русский العربية עברית",
        "emoji 👍🏽 👩‍👩‍👧‍👦 🇮🇹 \u0000\u200b\ufeff\U0010ffff",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_every_token_id_of_the_model_has_a_token(tokenizer: Any, model: Any) -> None:
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().num_embeddings
    assert None not in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))


def test_text_begins_with_bos_and_names_the_same_special_tokens(tokenizer: Any, model: Any) -> None:
    assert tokenizer("Call me Ishmael.").input_ids[0] == tokenizer.bos_token_id
    for ids in (model.config, model.generation_config):
        assert ids.bos_token_id == tokenizer.bos_token_id
        assert ids.eos_token_id == tokenizer.eos_token_id


def test_the_chat_template_marks_each_role_and_begins_a_reply(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Emma by Jane Austen"},
        {"role": "user", "content": "How do you do?"},
        {"role": "assistant", "content": "Very well."},
        {"role": "user", "content": [{"type": "text", "text": "I am glad."}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Emma by Jane Austen<|user|>How do you do?"
        "<|assistant|>Very well.<|eos|><|user|>I am glad.<|assistant|>"
    )


def test_the_chat_template_writes_bos_once(tokenizer: Any) -> None:
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=True
    )
    assert encoded["input_ids"].count(tokenizer.bos_token_id) == 1
    assert encoded["input_ids"][-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_english_is_far_likelier_than_chance(model: Any, tokenizer: Any) -> None:
    sentence = (
        "It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife."
    )
    loss = mean_loss(model, tokenizer, sentence)
    assert loss < 0.55 * math.log(model.config.vocab_size), loss


def test_words_in_order_are_likelier_than_the_same_words_shuffled(
    model: Any, tokenizer: Any
) -> None:
    ordered = "She looked at him for a moment, and then went out of the room without a word."
    shuffled = "Word at room, a him of moment and without for looked the then she out a went."
    assert mean_loss(model, tokenizer, ordered) < mean_loss(model, tokenizer, shuffled) - 1.0


def test_late_positions_are_as_predictable_as_early_ones(model: Any, tokenizer: Any) -> None:
    sentence = " He was very glad to see her, and she said that it was a fine day."
    ids = tokenizer(sentence * 113, return_tensors="pt").input_ids  # just under 2,048 tokens
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert losses[-256:].mean() < losses[:64].mean()
