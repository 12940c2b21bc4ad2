"""Serializes answers in OpenAI's formats.

A stream has about one chunk for each token. So the part that all chunks of an answer share is
serialized once, and the rest is put together from strings. All text is escaped to ASCII, since many
clients split lines at more characters than Server-Sent Events do.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple, Protocol

from gateway.http.long_responses import dumped
from gateway.prompts.prompt_logprobs import PromptScores
from gateway.text.choice_text import Delta, ScoredToken
from gateway.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; OpenAI writes this for what cannot happen.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens that an answer used."""

    prompt_tokens: int  # each prompt once, however many choices continue it
    completion_tokens: int  # generated, shown or not; of a beam search, shown ones only
    cached_tokens: int  # of the prompts, found in the prefix cache

    def body(self) -> dict[str, Any]:
        """The ``usage`` object of an answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
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
    """One of OpenAI's formats."""

    def resume(self, begun: Iterable[int]) -> None:
        """Continue a stream in which these choices have begun already."""

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> list[StreamEvent]:
        """At least one event for a delta of one choice; the last one completes it.

        Args:
            usage: so far, if every event shows it.
        """

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event that shows the usage at the end of a stream."""

    def whole(
        self, choices: Sequence[Delta], usage: Usage, prompts: Sequence[PromptScores]
    ) -> bytes:
        """The answer in one piece.

        Args:
            prompts: scores of each prompt, empty if they are not shown; all prompts have the same
                number of choices.
        """


class CompletionSerializer:
    """Writes ``text_completion`` objects."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._frame = _Frame(head, "text_completion", "text_completion")
        self._begun: set[int] = set()

    def resume(self, begun: Iterable[int]) -> None:
        self._begun.update(begun)

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> list[StreamEvent]:
        extra = _beam_score_json(delta)
        if self._head.token_ids:
            fields: dict[str, Any] = {"token_ids": delta.token_ids}
            if index not in self._begun:
                fields["prompt_token_ids"] = self._head.prompt_tokens[index]
                self._begun.add(index)
            extra += "," + json.dumps(fields)[1:-1]
        data = self._frame.event(
            f'{{"index":{index},"text":{encode_basestring_ascii(delta.text)},'
            f'"logprobs":{self._logprobs_json(delta.scored)},'
            f'"finish_reason":{_finish_json(delta)}{extra}}}',
            usage,
        )
        return [StreamEvent(data, True, delta.finish_reason is not None)]

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frame.event("", usage)

    def whole(
        self, choices: Sequence[Delta], usage: Usage, prompts: Sequence[PromptScores]
    ) -> bytes:
        scored = [_prompt_logprobs(scores, self._tokenizer) for scores in prompts]
        shown = []
        for index, delta in enumerate(choices):
            choice: dict[str, Any] = {
                "index": index,
                "text": delta.text,
                "logprobs": self._logprobs(delta.scored),
                "finish_reason": delta.finish_reason,
                **_beam_score(delta),
            }
            if self._head.token_ids:
                choice["token_ids"] = delta.token_ids
                choice["prompt_token_ids"] = self._head.prompt_tokens[index]
            if scored:
                choice["prompt_logprobs"] = scored[index * len(scored) // len(choices)]
            shown.append(choice)
        return self._frame.whole({"choices": shown, "usage": usage.body()})

    def _logprobs_json(self, scored: Sequence[ScoredToken]) -> str:
        return json.dumps(self._logprobs(scored)) if scored else "null"

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not scored:
            return None
        name = self._token_name
        top: list[dict[str, float] | None] = []
        for item in scored:
            if item.scores is None:
                top.append(None)
                continue
            best = {
                name(token): _finite(logprob)
                for token, logprob in zip(
                    item.scores.top_ids.tolist(), item.scores.top_logprobs.tolist(), strict=True
                )
            }
            # The chosen token is always listed, even if it is not among the likeliest.
            best.setdefault(name(item.token), _finite(item.scores.logprob))
            top.append(best)
        return {
            "tokens": [name(item.token) for item in scored],
            "token_logprobs": [
                None if item.scores is None else _finite(item.scores.logprob) for item in scored
            ],
            "top_logprobs": top,
            "text_offset": [item.offset for item in scored],
        }

    def _token_name(self, token: int) -> str:
        """Text of a token; its bytes where they are not UTF-8, so that such tokens differ."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatSerializer:
    """Writes ``chat.completion`` objects and their chunks."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._frame = _Frame(head, "chat.completion", "chat.completion.chunk")
        self._begun: set[int] = set()

    def resume(self, begun: Iterable[int]) -> None:
        self._begun.update(begun)

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> list[StreamEvent]:
        events = []
        if index not in self._begun:
            events.append(StreamEvent(self._first(index, usage), False, False))
            self._begun.add(index)
        token_ids = f',"token_ids":{json.dumps(delta.token_ids)}' if self._head.token_ids else ""
        if delta.text or delta.scored or (self._head.token_ids and delta.token_ids):
            logprobs = json.dumps(self._logprobs(delta.scored)) if delta.scored else "null"
            text = encode_basestring_ascii(delta.text)
            data = self._frame.event(
                f'{{"index":{index},"delta":{{"content":{text}}},"logprobs":{logprobs},'
                f'"finish_reason":null{token_ids}}}',
                usage,
            )
            events.append(StreamEvent(data, True, False))
        if delta.finish_reason is not None:
            data = self._frame.event(
                f'{{"index":{index},"delta":{{}},"logprobs":null,'
                f'"finish_reason":{_finish_json(delta)}{_beam_score_json(delta)}}}',
                usage,
            )
            events.append(StreamEvent(data, True, True))
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frame.event("", usage)

    def whole(
        self, choices: Sequence[Delta], usage: Usage, prompts: Sequence[PromptScores]
    ) -> bytes:
        shown = []
        for index, delta in enumerate(choices):
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta.scored) if delta.scored else None,
                "finish_reason": delta.finish_reason,
                **_beam_score(delta),
            }
            if self._head.token_ids:
                choice["token_ids"] = delta.token_ids
            shown.append(choice)
        fields: dict[str, Any] = {"choices": shown, "usage": usage.body()}
        if self._head.token_ids:
            fields["prompt_token_ids"] = self._head.prompt_tokens[0]
        if prompts:
            fields["prompt_logprobs"] = _prompt_logprobs(prompts[0], self._tokenizer)
        return self._frame.whole(fields)

    def _first(self, index: int, usage: Usage | None) -> bytes:
        extra = ""
        if self._head.token_ids and not self._begun:  # all choices have the same prompt
            extra = f',"prompt_token_ids":{json.dumps(self._head.prompt_tokens[index])}'
        return self._frame.event(
            f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            '"finish_reason":null}',
            usage,
            extra,
        )

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = []
        for item in scored:
            if item.scores is None:
                continue
            top = zip(item.scores.top_ids.tolist(), item.scores.top_logprobs.tolist(), strict=True)
            shown = self._scored(item.token, item.scores.logprob)
            shown["top_logprobs"] = [self._scored(token, logprob) for token, logprob in top]
            content.append(shown)
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {
            "token": data.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }


class _Frame:
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
        if usage is None:
            return f"{self._before}{choice}]{extra}{self._after}".encode("ascii")
        cost = json.dumps(usage.body())
        return f'{self._before}{choice}]{extra},"usage":{cost}}}\n\n'.encode("ascii")

    def whole(self, fields: dict[str, Any]) -> bytes:
        return dumped({**self._whole, **fields})


def error_event(body: dict[str, Any]) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + json.dumps(body).encode("ascii") + b"\n\n"


def _prompt_logprobs(prompt: PromptScores, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Scores by token id for each position of a prompt: of the likeliest tokens and its own."""

    def shown(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode(errors="replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    places: list[dict[str, Any] | None] = []
    for token, scores in prompt:
        if scores is None:
            places.append(None)
            continue
        top = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        place = {
            str(other): shown(other, logprob, rank) for rank, (other, logprob) in enumerate(top, 1)
        }
        place.setdefault(str(token), shown(token, scores.logprob, None))
        places.append(place)
    return places


def _finish_json(delta: Delta) -> str:
    return "null" if delta.finish_reason is None else f'"{delta.finish_reason.value}"'


def _beam_score(delta: Delta) -> dict[str, float]:
    return {} if delta.beam_score is None else {"beam_score": delta.beam_score}


def _beam_score_json(delta: Delta) -> str:
    return "" if delta.beam_score is None else f',"beam_score":{json.dumps(delta.beam_score)}'


def _finite(logprob: float) -> float:
    return max(float(logprob), _LOWEST_LOGPROB)
