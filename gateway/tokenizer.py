"""The model's tokenizer and chat template."""

import threading
from collections.abc import Sequence
from typing import Any

from gateway.detokenize import Detokenizer
from gateway.vocabulary import Vocabulary, vocabulary_of
from shared.errors import ModelUnsupported


class TemplateRefused(Exception):
    """The chat template does not accept these messages; the text says why."""


class Tokenizer:
    """Text to tokens and back, as transformers does it.

    All methods may be called from several threads.

    Args:
        source: a tokenizer of transformers.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._slow_lock = threading.Lock()
        self._backend = getattr(source, "backend_tokenizer", None)
        if self._backend is not None:
            # transformers sets both anew on every call, which no two threads may do at once.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.bos_token_id: int | None = source.bos_token_id
        self.size = len(source)
        self._vocabulary: Vocabulary = vocabulary_of(
            self._backend, self.decode, lambda tokens: self.decode(tokens, skip_special=False)
        )

    @staticmethod
    def preload() -> None:
        """Import what ``load`` will need, and nothing else."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        assert AutoTokenizer, PreTrainedTokenizerFast

    @staticmethod
    def load(model: str, trust_remote_code: bool) -> "Tokenizer":
        """Tokenizer of a model folder or hub id.

        Raises:
            ModelUnsupported: there is none, or it cannot be read.
        """
        from transformers import AutoTokenizer

        try:
            source = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises many unrelated types
            raise ModelUnsupported(f"no tokenizer for {model}: {error}") from error
        return Tokenizer(source)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` can work at all."""
        return bool(self._source.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; names of special tokens in it become those tokens."""
        if self._backend is not None:
            # Of all ways to encode, this one lets other threads run.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = batch[0].ids
            return ids
        with self._slow_lock:
            return list(self._source.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Text of tokens."""
        if self._backend is not None:
            return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special))
        with self._slow_lock:
            return str(
                self._source.decode(
                    list(tokens),
                    skip_special_tokens=skip_special,
                    clean_up_tokenization_spaces=False,
                )
            )

    def offsets(self, text: str) -> list[int] | None:
        """Characters of a text before each of the tokens that ``encode`` makes of it.

        None if the tokenizer cannot tell.
        """
        if self._backend is None:
            return None
        offsets, reached = [], 0
        for start, end in self._backend.encode_batch([text])[0].offsets:
            # A token that was added stands nowhere, and a space before a token may count as none's.
            offsets.append(min(start, reached) if end > start else reached)
            reached = max(reached, end)
        return offsets

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for, by itself."""
        return self._vocabulary.token_bytes(token)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A new text, token by token, that continues the text of ``context``."""
        return self._vocabulary.detokenizer(context)

    def render_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt for a conversation, special tokens included.

        Raises:
            TemplateRefused: the template says no.
        """
        try:
            text: str = self._source.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates are programs of the model's authors
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error
        return text
