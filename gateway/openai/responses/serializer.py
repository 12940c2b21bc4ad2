"""What the serializers of OpenAI's formats have in common.

A stream has about one chunk for each token. So the part that all chunks of an answer share is
serialized once, and the rest is put together from strings. All text is escaped to ASCII, since many
clients split lines at more characters than Server-Sent Events do.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gateway.http.errors import ApiError
from gateway.http.long_responses import dumped
from gateway.prompts.prompt_logprobs import PromptScores
from gateway.text.choice_text import Delta

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens that an answer used."""

    prompt_tokens: int  # each prompt once, however many choices continue it
    completion_tokens: int  # generated, shown or not; of a beam search, shown ones only
    cached_tokens: int  # of the prompts, found in the prefix cache
    reasoning_tokens: int = 0  # of those generated

    def body(self) -> dict[str, Any]:
        """The ``usage`` object of an answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer have in common.

    Attributes:
        created: seconds since 1970.
        token_ids: the answer shows token ids.
        prompt_tokens: by choice, shown where token ids are.
    """

    id: str
    model: str
    created: int
    include_usage: bool
    token_ids: bool
    prompt_tokens: Sequence[list[int]]


class StreamEvent(NamedTuple):
    """One Server-Sent Event, and which parts of a delta it shows."""

    data: bytes
    shows_tokens: bool
    shows_end: bool


class Serializer(Protocol):
    """A format of answers."""

    def resume(self, begun: Iterable[int]) -> None:
        """Continue a stream in which these choices have begun already."""

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> list[StreamEvent]:
        """At least one event for a delta of one choice; the last one completes it.

        Args:
            usage: so far, if every event shows it.
        """

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event that shows the usage at the end of a stream."""

    def done(self, usage: Usage) -> bytes:
        """The events at the end of a stream that ended well."""

    def error(self, error: ApiError) -> bytes:
        """The event at the end of a stream that did not."""

    def whole(
        self, choices: Sequence[Delta], usage: Usage, prompts: Sequence[PromptScores]
    ) -> bytes:
        """The answer in one piece.

        Args:
            prompts: scores of each prompt, empty if they are not shown; all prompts have the same
                number of choices.
        """


class OpenAIStreamEnd:
    """How streams of OpenAI's two older formats end."""

    def done(self, usage: Usage) -> bytes:  # noqa: ARG002
        return _DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + json.dumps(error.body()).encode("ascii") + b"\n\n"


class Frame:
    """The fields around the choices of every chunk."""

    def __init__(self, head: AnswerHead, whole_object: str, chunk_object: str) -> None:
        self._whole = {
            "id": head.id,
            "object": whole_object,
            "created": head.created,
            "model": head.model,
        }
        shared = json.dumps({**self._whole, "object": chunk_object}, separators=(",", ":"))[:-1]
        self._before = f'data: {shared},"choices":['
        self._after = ',"usage":null}\n\n' if head.include_usage else "}\n\n"

    def event(self, choice: str, usage: Usage | None = None, extra: str = "") -> bytes:
        """A chunk as an event.

        Args:
            choice: JSON of its only choice; "" for none.
            usage: None if it shows none.
            extra: JSON of further fields, each after a comma.
        """
        if usage is None:
            return f"{self._before}{choice}]{extra}{self._after}".encode("ascii")
        cost = json.dumps(usage.body())
        return f'{self._before}{choice}]{extra},"usage":{cost}}}\n\n'.encode("ascii")

    def whole(self, fields: dict[str, Any]) -> bytes:
        """The answer in one piece, with these fields."""
        return dumped({**self._whole, **fields})


def finish_json(delta: Delta) -> str:
    """JSON of a delta's finish reason."""
    return "null" if delta.finish_reason is None else f'"{delta.finish_reason.value}"'


def beam_score(delta: Delta) -> dict[str, float]:
    """The field with the score of what a beam search found; none for anything else."""
    return {} if delta.beam_score is None else {"beam_score": delta.beam_score}


def beam_score_json(delta: Delta) -> str:
    """JSON of ``beam_score``, after a comma; "" for no field."""
    return "" if delta.beam_score is None else f',"beam_score":{json.dumps(delta.beam_score)}'
