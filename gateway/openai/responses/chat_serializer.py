"""Serializes answers of /v1/chat/completions."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from gateway.answers.events import CallDelta
from gateway.openai.responses.logprobs import finite, prompt_logprobs_body
from gateway.openai.responses.serializer import (
    AnswerHead,
    Frame,
    OpenAIStreamEnd,
    StreamEvent,
    Usage,
    beam_score,
    beam_score_json,
)
from gateway.prompts.prompt_logprobs import PromptScores
from gateway.text.choice_text import Delta, ScoredToken
from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import FinishReason

_CALL_ID_CHARS = 24


@dataclass(frozen=True, slots=True)
class CallIds:
    """Ids of calls of tools, the same whichever gateway shows the answer.

    Attributes:
        seed: the id of the HTTP call.
        num_chars: of an id, where the chat template takes no other length; 0: any.
    """

    seed: str
    num_chars: int = 0

    def of(self, choice: int, call: int) -> str:
        """The id of a choice's call."""
        data = f"{self.seed}/{choice}/{call}".encode()
        digest = hashlib.blake2b(data, digest_size=16, person=b"tool call").hexdigest()
        return digest[: self.num_chars] if self.num_chars else f"call_{digest[:_CALL_ID_CHARS]}"


class ChatSerializer(OpenAIStreamEnd):
    """Writes ``chat.completion`` objects and their chunks."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, call_ids: CallIds) -> None:
        self._head = head
        self._call_ids = call_ids
        self._tokenizer = tokenizer
        self._frame = Frame(head, "chat.completion", "chat.completion.chunk")
        self._begun: set[int] = set()

    def resume(self, begun: Iterable[int]) -> None:
        self._begun.update(begun)

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> list[StreamEvent]:
        events = []
        if index not in self._begun:
            events.append(StreamEvent(self._first(index, usage), False, False))
            self._begun.add(index)
        token_ids = f',"token_ids":{json.dumps(delta.token_ids)}' if self._head.token_ids else ""
        parts = bool(delta.text or delta.reasoning or delta.calls)
        # Of two events, the first would stand for tokens that make less text without the end.
        is_one = parts and delta.shows_held and delta.finish_reason is not None
        finish = f'"{_finish_reason(delta)}"' if delta.finish_reason is not None else "null"
        if parts or delta.scored or (self._head.token_ids and delta.token_ids):
            logprobs = json.dumps(self._logprobs(delta.scored)) if delta.scored else "null"
            data = self._frame.event(
                f'{{"index":{index},"delta":{self._delta(index, delta)},"logprobs":{logprobs},'
                f'"finish_reason":{finish if is_one else "null"}{token_ids}'
                f"{beam_score_json(delta) if is_one else ''}}}",
                usage,
            )
            events.append(StreamEvent(data, True, is_one))
        if delta.finish_reason is not None and not is_one:
            data = self._frame.event(
                f'{{"index":{index},"delta":{{}},"logprobs":null,'
                f'"finish_reason":{finish}{beam_score_json(delta)}}}',
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
                "message": self._message(index, delta),
                "logprobs": self._logprobs(delta.scored) if delta.scored else None,
                "finish_reason": _finish_reason(delta),
                **beam_score(delta),
            }
            if self._head.token_ids:
                choice["token_ids"] = delta.token_ids
            shown.append(choice)
        fields: dict[str, Any] = {"choices": shown, "usage": usage.body()}
        if self._head.token_ids:
            fields["prompt_token_ids"] = self._head.prompt_tokens[0]
        if prompts:
            fields["prompt_logprobs"] = prompt_logprobs_body(prompts[0], self._tokenizer)
        return self._frame.whole(fields)

    def _delta(self, index: int, delta: Delta) -> str:
        """JSON of what is new, all in one chunk: an event id stands behind all of it or none."""
        fields = []
        if delta.reasoning:
            text = encode_basestring_ascii(delta.reasoning)
            fields.append(f'"reasoning_content":{text},"reasoning":{text}')
        if delta.calls:
            calls = [self._call_delta(index, call) for call in delta.calls]
            fields.append(f'"tool_calls":[{",".join(calls)}]')
        if delta.text or not fields:
            fields.insert(0, f'"content":{encode_basestring_ascii(delta.text)}')
        return f"{{{','.join(fields)}}}"

    def _call_delta(self, index: int, call: CallDelta) -> str:
        arguments = encode_basestring_ascii(call.arguments)
        if call.name is None:
            return f'{{"index":{call.index},"function":{{"arguments":{arguments}}}}}'
        identity, name = self._call_ids.of(index, call.index), encode_basestring_ascii(call.name)
        return (
            f'{{"index":{call.index},"id":"{identity}","type":"function",'
            f'"function":{{"name":{name},"arguments":{arguments}}}}}'
        )

    def _message(self, index: int, delta: Delta) -> dict[str, Any]:
        content = None if delta.calls and not delta.text else delta.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if delta.reasoning:
            message |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        if delta.calls:
            message["tool_calls"] = [
                {
                    "id": self._call_ids.of(index, call.index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in delta.calls
            ]
        return message

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
            "logprob": finite(logprob),
            "bytes": list(data),
        }


def _finish_reason(delta: Delta) -> str:
    """Why a choice ended: for its calls of tools, unless they were cut off."""
    reason = delta.finish_reason
    assert reason is not None
    return "tool_calls" if delta.has_calls and reason is FinishReason.STOP else reason.value
