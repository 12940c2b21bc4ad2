"""What the worker reads of a tokenizer is the same, wherever the model has it."""

from pathlib import Path

import gguf

from gpu_worker.grammar.tokenizer import load_grammar_tokenizer
from gpu_worker.model.check.tokens import text_tokens
from gpu_worker.model.tokenizer_file import TokenizerFile
from tests.support.gguf_files import DEMO, add_tokenizer


def test_a_gguf_file_has_the_tokenizer_that_its_metadata_describe(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found, original = TokenizerFile(str(tmp_path / "model.gguf")), TokenizerFile(str(DEMO))
    assert text_tokens(found) == text_tokens(original)
    assert len(text_tokens(found)) > 10
    tokenizer = load_grammar_tokenizer(found, 4096, [1])
    assert tokenizer is not None
    assert tokenizer.vocab_size == 4096


def test_without_a_file_there_are_neither_text_nor_grammars(tmp_path: Path) -> None:
    missing = TokenizerFile(str(tmp_path))
    assert text_tokens(missing) == []
    assert load_grammar_tokenizer(missing, 4096, [1]) is None
