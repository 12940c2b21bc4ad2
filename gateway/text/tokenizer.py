"""Encodes and decodes with the model's tokenizer and renders its chat template."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.answers.answer_formats import AnswerFormats, texts_of
from gateway.answers.model_template import preload_parser, read_model_template
from gateway.prompts.chat_encoder import LiteralTextEncoder
from gateway.prompts.control_tokens import (
    ControlTokens,
    Conversation,
    RenderedChat,
    TemplateRefused,
)
from gateway.prompts.template_analysis import writes_names_whole
from gateway.text.detokenizer import Detokenizer, MarkerDetokenizer
from gateway.text.text_limits import TextBound, text_bound
from gateway.text.vocabulary import Vocabulary, vocabulary_of
from shared.errors import ModelUnsupported
from shared.gguf.header import read_header
from shared.gguf.location import gguf_file_of
from shared.gguf.tokenizer import load_tokenizer

_UNKNOWN = "\N{SYMBOL FOR DELETE}\U0010fffd"  # in no vocabulary, unless as bytes


class Tokenizer:
    """Text to tokens and back, with the results of transformers. Thread-safe.

    Args:
        source: a tokenizer of transformers.
        special_in_messages: names of special tokens in chat messages become those tokens.

    Attributes:
        text_bound: least number of tokens of a text, None if it has no bound.
    """

    def __init__(self, source: Any, special_in_messages: bool = False) -> None:
        self._source = source
        self._literal_lock = threading.Lock()  # guards `_literal_encoder`
        self._literal_encoder: LiteralTextEncoder | None = None
        self._slow_lock = threading.Lock()
        self._backend = getattr(source, "backend_tokenizer", None)
        if self._backend is not None:
            # transformers sets both on every call, which is not thread-safe.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._control = ControlTokens((), ()) if special_in_messages else self._control_tokens()
        self._control_ids = {source.convert_tokens_to_ids(name) for name in self._control.names}
        self.bos_token_id: int | None = source.bos_token_id
        self.size = len(source)
        self.text_bound: TextBound | None = text_bound(self._backend)
        self._vocabulary: Vocabulary = vocabulary_of(
            self._backend, self.decode, lambda tokens: self.decode(tokens, skip_special=False)
        )

    @staticmethod
    def preload() -> None:
        """Import what ``load`` needs."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        assert AutoTokenizer, PreTrainedTokenizerFast
        preload_parser()

    @staticmethod
    def load(model: str, trust_remote_code: bool, special_in_messages: bool = False) -> "Tokenizer":
        """Tokenizer of a model folder, GGUF file or hub id.

        Raises:
            ModelUnsupported: the model has no tokenizer, or it cannot be read.
        """
        from transformers import AutoTokenizer

        file = gguf_file_of(model)
        if file is not None:
            return Tokenizer(load_tokenizer(read_header(file)), special_in_messages)
        try:
            source = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises many unrelated types
            raise ModelUnsupported(f"no tokenizer for {model}: {error}") from error
        return Tokenizer(source, special_in_messages)

    @property
    def as_json(self) -> Callable[[], str] | None:
        """Makes the text of its ``tokenizer.json``; None: it has none."""
        return None if self._backend is None else self._backend.to_str

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._source.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; names of special tokens in it become those tokens."""
        if self._backend is not None:
            # This method of encoding releases the GIL.
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
        """The characters before each token of ``encode(text)``; None if they cannot be found."""
        if self._backend is None:
            return None
        offsets, reached = [], 0
        for start, end in self._backend.encode_batch([text])[0].offsets:
            # An added special token covers no text, and a space may belong to no token.
            offsets.append(min(start, reached) if end > start else reached)
            reached = max(reached, end)
        return offsets

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token by itself."""
        return self._vocabulary.token_bytes(token)

    def detokenizer(
        self, context: Sequence[int] = (), shown: Mapping[str, int] | None = None
    ) -> Detokenizer:
        """A detokenizer for text that continues the text of ``context``.

        Args:
            shown: special tokens that are part of the text, by name.
        """
        if not shown:
            return self._vocabulary.detokenizer(context)
        names = {token: name for name, token in shown.items()}
        return MarkerDetokenizer(self._vocabulary.detokenizer, names, context)

    def answer_formats(self, calls: str, reasoning: str) -> AnswerFormats:
        """The formats in which the model answers.

        Args:
            calls: format of calls of tools, one of ``CALL_CHOICES``.
            reasoning: format of reasoning, one of ``REASONING_CHOICES``.
        """
        added = self._source.added_tokens_decoder.items()
        return AnswerFormats(
            texts_of(self._source.chat_template),
            {info.content: token if info.special else None for token, info in added},
            read_model_template(self._source),
            calls,
            reasoning,
        )

    def template_reads(self, name: str) -> bool:
        """Whether this word stands in the chat template."""
        pattern = re.compile(rf"\b{re.escape(name)}\b")
        return any(pattern.search(each) for each in texts_of(self._source.chat_template))

    @property
    def control_edges(self) -> frozenset[str]:
        """Characters, no letters or digits, at which names of control tokens begin or end."""
        return self._control.edges

    def render_chat(self, chat: Conversation) -> str:
        """The prompt for a conversation, special tokens included.

        Raises:
            TemplateRefused: the template raised an error.
        """
        try:
            text: str = self._source.apply_chat_template(
                list(chat.messages),
                tools=None if chat.tools is None else list(chat.tools),
                tokenize=False,
                add_generation_prompt=chat.options.add_generation_prompt,
                continue_final_message=chat.options.continues_final,
                **chat.options.variables,
            )
        except Exception as error:  # templates are programs of the model's authors
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error
        return text

    def render_with_control_tokens(self, chat: Conversation) -> RenderedChat:
        """The prompt for a conversation, and which control tokens in it the template wrote.

        Raises:
            TemplateRefused: the template raised an error, or these tokens cannot be found.
        """
        if not self._control.names:
            return RenderedChat(self.render_chat(chat))
        return self._control.render(self.render_chat, chat)

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Token ids of a conversation; text of messages never becomes a control token.

        Raises:
            TemplateRefused: this tokenizer cannot encode such text otherwise.
        """
        ids = self.encode(chat.text, add_special_tokens=False)  # the template has them already
        if chat.control is None:
            return ids
        names = [span.name for span in chat.control]
        found = [token for token in ids if token in self._control_ids]
        if found == [self._source.convert_tokens_to_ids(name) for name in names]:
            return ids
        if self._backend is None:
            return self._encoded_in_pieces(chat)
        with self._literal_lock:
            if self._literal_encoder is None:
                self._literal_encoder = LiteralTextEncoder(self._backend, self._control.names)
        return self._literal_encoder.encode(chat)

    def _encoded_in_pieces(self, chat: RenderedChat) -> list[int]:
        ids: list[int] = []
        end = 0

        def add_text(text: str) -> None:
            if text:
                ids.extend(
                    self._source.encode(text, add_special_tokens=False, split_special_tokens=True)
                )

        with self._slow_lock:
            for span in chat.control or ():
                add_text(chat.text[end : span.start])
                ids.append(self._source.convert_tokens_to_ids(span.name))
                end = span.end
            add_text(chat.text[end:])
        if sum(token in self._control_ids for token in ids) != len(chat.control or ()):
            raise TemplateRefused("a message holds a control token, which cannot be read as text")
        return ids

    def _control_tokens(self) -> ControlTokens:
        """Special tokens, and other added tokens that the chat template writes."""
        source = self._source
        template = source.chat_template or ""
        sources = list(template.values()) if isinstance(template, dict) else [template]
        added = [token for token in source.added_tokens_decoder.values() if token.content.strip()]
        special = {token.content for token in added if token.special}
        given = special.copy()  # templates are given all of them
        if source.unk_token_id in self.encode(_UNKNOWN, add_special_tokens=False):
            special.discard(source.unk_token)  # any text may become it
        marks = {token.content for token in added if any(token.content in each for each in sources)}
        whole = all(writes_names_whole(each, given | marks) for each in sources)
        return ControlTokens(special, marks - special, whole)
