"""The real model's folder is what transformers expects of SmolLM2-135M-Instruct."""

import json
from pathlib import Path

from tests.real_model.alone import Alone


def test_its_shape_and_context(real_model: Path) -> None:
    config = json.loads((real_model / "config.json").read_text())
    shape = [config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")]
    assert shape == [30, 576, 49_152]
    assert config["max_position_embeddings"] == 8_192
    assert config["dtype"] == "bfloat16"


def test_its_tokenizer_takes_digits_one_by_one_and_gives_any_text_back(alone: Alone) -> None:
    text = "Grüße,  12 345 times: 漢字 🙂\n\n\tdone  "
    tokens = alone.encode(text)
    assert alone.tokenizer.decode(tokens) == text
    assert alone.encode("12") == [alone.encode(digit)[0] for digit in "12"]
    assert alone.encode("a  1") == [alone.encode(part)[0] for part in ("a", "  ", "1")]


def test_its_chat_format_ends_with_the_assistants_turn(alone: Alone) -> None:
    text = alone.tokenizer.decode(alone.chat("Hello"))
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")
    assert alone.tokenizer.eos_token == "<|im_end|>"
