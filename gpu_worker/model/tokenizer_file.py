"""The model's fast tokenizer as text, for what reads tokenizers without transformers."""

from functools import cached_property
from pathlib import Path

from shared.gguf.header import read_header
from shared.gguf.location import gguf_file_of
from shared.gguf.tokenizer import load_tokenizer


class TokenizerFile:
    """The ``tokenizer.json`` of a model; for a GGUF file, what it would be.

    Args:
        model: folder, GGUF file or hub id.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    @cached_property
    def text(self) -> str:
        """Its text, read at the first use. The errors of a failure are of any kind."""
        file = gguf_file_of(self._model)
        if file is not None:
            return str(load_tokenizer(read_header(file)).backend_tokenizer.to_str())
        if Path(self._model).is_dir():
            return (Path(self._model) / "tokenizer.json").read_text()
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(self._model, "tokenizer.json")).read_text()
