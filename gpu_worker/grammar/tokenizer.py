"""The model's tokenizer as grammars need it: the bytes of every token."""

import time
from collections.abc import Sequence

from llguidance import LLTokenizer

from gpu_worker.model.tokenizer_file import TokenizerFile
from shared.logs import EventLog

log = EventLog(__name__)


def load_grammar_tokenizer(
    file: TokenizerFile, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer | None:
    """The tokenizer of a model for llguidance; None: it cannot be read, and the log says why.

    Args:
        file: of the model.
        vocab_size: of the model; its tokenizer may have fewer tokens.
        eos_token_ids: tokens that may follow a finished text; without any, a text could not end.
    """
    began = time.monotonic()
    if not eos_token_ids:
        log.info("no structured output", because="the model has no end-of-sequence token")
        return None
    try:
        tokenizer = LLTokenizer(file.text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:  # of any kind: llguidance raises what its tokenizers raise
        log.info("no structured output", because=error)
        return None
    log.info("tokenizer for grammars loaded", seconds=round(time.monotonic() - began, 1))
    return tokenizer
