"""The formats in which one model answers, and parsers for them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from gateway.answers.events import AnswerParser
from gateway.answers.family_parser import FamilyParser
from gateway.answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    CallWrapper,
    ReasoningFormat,
    call_format_of,
    reasoning_format_of,
)
from gateway.answers.model_template import ModelTemplate, ModelTemplateParser
from gateway.answers.options import AnswerOptions
from gateway.answers.parser_names import AUTO, NONE
from gateway.answers.tag_calls import Tags

MODEL = "model"  # the response template that comes with the tokenizer


class UnknownFormat(Exception):
    """This gateway has no format by the name in the text."""


class AnswerFormats:
    """The formats of one model.

    Args:
        templates: its chat templates.
        tokens: ids of its special tokens, by name; None for other added tokens.
        model: its own response template, if it has one.
        calls: the format of calls, or AUTO or NONE.
        reasoning: the format of reasoning, or AUTO or NONE.

    Attributes:
        calls: the format's name, None if it has none.
        reasoning: likewise.
        describes_tools: its chat template describes tools to it.
    """

    def __init__(
        self,
        templates: Sequence[str],
        tokens: Mapping[str, int | None],
        model: ModelTemplate | None = None,
        calls: str = AUTO,
        reasoning: str = AUTO,
    ) -> None:
        own = MODEL if model is not None else None
        self._model = model
        self._added = frozenset(tokens)
        self._special = {name: token for name, token in tokens.items() if token is not None}
        self.calls = _chosen(calls, own or call_format_of(templates))
        self.reasoning = _chosen(reasoning, own or reasoning_format_of(templates, tokens))
        self.describes_tools = any("tools" in template for template in templates)

    def reads_tools(self, calls: str) -> bool:
        """Whether calls in this format are parsed by the names and parameters of the tools."""
        known = CALL_FORMATS.get(calls)
        return known is None or known.bare or known.tags is not None

    def written(self, calls: str) -> tuple[CallWrapper, Tags | None] | None:
        """How calls in this format are written where an answer must have some; None: not known."""
        if calls == MODEL:
            known = None if self._model is None else self._model.wrapper
            return None if known is None else (known, None)
        found = CALL_FORMATS.get(calls)
        return None if found is None else (found.wrapper, found.tags)

    def reasoning_in(self, options: AnswerOptions) -> ReasoningFormat | None:
        """The markers around the reasoning of an answer; None: there are none, or not known."""
        if options.reasoning == MODEL:
            return None if self._model is None else self._model.reasoning
        return REASONING_FORMATS.get(options.reasoning)

    def has_token(self, name: str) -> bool:
        """Whether the tokenizer has a token of its own for this text."""
        return name in self._added

    def parsers(self, options: AnswerOptions, prompt_end: str) -> Callable[[], AnswerParser]:
        """Makes parsers for the answers to one prompt.

        Args:
            prompt_end: the last text of the prompt, where reasoning may have begun.

        Raises:
            UnknownFormat: another gateway had a format that this one does not have.
        """
        strings = options.strings
        if MODEL in (options.calls, options.reasoning):
            if self._model is None:
                raise UnknownFormat(MODEL)
            finds_calls = options.calls == MODEL
            return partial(ModelTemplateParser, self._model, finds_calls, prompt_end, strings)
        try:
            calls = CALL_FORMATS[options.calls] if options.calls else None
            reasoning = REASONING_FORMATS[options.reasoning] if options.reasoning else None
        except KeyError as error:
            raise UnknownFormat(error.args[0]) from None
        in_reasoning = reasoning is not None and prompt_end.rstrip().endswith(reasoning.open)
        return partial(FamilyParser, calls, reasoning, strings, in_reasoning)

    def shown_tokens(self, options: AnswerOptions) -> Mapping[str, int]:
        """Special tokens that the parser must see in the text, by name."""
        text = "\n".join(self._markers(options)).replace("\\", "")
        return {name: token for name, token in self._special.items() if name in text}

    def _markers(self, options: AnswerOptions) -> Iterable[str]:
        if MODEL in (options.calls, options.reasoning) and self._model is not None:
            yield from self._model.marks
        if options.calls in CALL_FORMATS:
            yield from CALL_FORMATS[options.calls].markers
        if options.reasoning in REASONING_FORMATS:
            each = REASONING_FORMATS[options.reasoning]
            yield from (each.open, each.close)


def id_chars(calls: str) -> int:
    """How many characters ids of calls have in this format; 0: any number."""
    return CALL_FORMATS[calls].id_chars if calls in CALL_FORMATS else 0


def _chosen(setting: str, found: str | None) -> str | None:
    if setting == NONE:
        return None
    return found if setting == AUTO else setting


def texts_of(chat_template: Any) -> list[str]:
    """The texts of a tokenizer's chat templates: it has none, one, or several by name."""
    if isinstance(chat_template, dict):
        return [str(text) for text in chat_template.values()]
    return [chat_template] if chat_template else []
