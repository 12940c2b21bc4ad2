"""The model's tokenizer as grammars need it: the bytes of every token."""

import time
from collections.abc import Sequence

from llguidance import LLTokenizer

from gpu_worker.model.check.tokens import tokenizer_file
from shared.logs import EventLog

log = EventLog(__name__)


def load_grammar_tokenizer(
    model: str, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer | None:
    """The tokenizer of a model for llguidance; None: it cannot be read, and the log says why.

    Args:
        model: folder or hub id.
        vocab_size: of the model; its tokenizer may have fewer tokens.
        eos_token_ids: tokens that may follow a finished text; without any, a text could not end.
    """
    began = time.monotonic()
    if not eos_token_ids:
        log.info("no structured output", because="the model has no end-of-sequence token")
        return None
    try:
        text = tokenizer_file(model).read_text()
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:  # of any kind: llguidance raises what its tokenizers raise
        log.info("no structured output", because=error)
        return None
    log.info("tokenizer for grammars loaded", seconds=round(time.monotonic() - began, 1))
    return tokenizer
