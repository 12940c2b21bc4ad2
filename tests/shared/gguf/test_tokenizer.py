"""The tokenizer in a GGUF file is the one that the model has in other files."""

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import transformers

from shared.errors import ModelUnsupported
from shared.gguf.header import read_header
from shared.gguf.tokenizer import load_tokenizer
from tests.support.gguf_files import DEMO, add_tokenizer

TEXTS = ["Once upon a time, 42 cats!", "  two spaces\n\n", "naïve <|user|> x", ""]


def file_with_tokenizer(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    add_tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return folder / "model.gguf"


def test_tokens_texts_and_chats_are_those_of_the_original(tmp_path: Path) -> None:
    found = load_tokenizer(read_header(file_with_tokenizer(tmp_path)))
    original = transformers.AutoTokenizer.from_pretrained(DEMO)
    for text in TEXTS:
        tokens = original.encode(text)
        assert found.encode(text) == tokens
        assert found.backend_tokenizer.encode(text).ids == tokens
        assert found.decode(tokens) == original.decode(tokens)
    chat = [{"role": "user", "content": "Hello"}]
    arguments = {"tokenize": False, "add_generation_prompt": True}
    assert found.apply_chat_template(chat, **arguments) == original.apply_chat_template(
        chat, **arguments
    )
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (0, 1, 2)
    assert len(found) == len(original)


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from shared.gguf.header import read_header
from shared.gguf.tokenizer import load_tokenizer
assert load_tokenizer(read_header(Path({str(file_with_tokenizer(tmp_path))!r}))).encode("a")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DEMO.parents[1])


def test_kinds_that_transformers_does_not_have_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.ggml\.model='rwkv'"):
        load_tokenizer(read_header(tmp_path / "model.gguf"))
