"""Serializes answers of /v1/chat/completions."""

import json
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from gateway.openai.responses.logprobs import finite, prompt_logprobs_body
from gateway.openai.responses.serializer import (
    AnswerHead,
    Frame,
    StreamEvent,
    Usage,
    beam_score,
    beam_score_json,
    finish_json,
)
from gateway.prompts.prompt_logprobs import PromptScores
from gateway.text.choice_text import Delta, ScoredToken
from gateway.text.tokenizer import Tokenizer


class ChatSerializer:
    """Writes ``chat.completion`` objects and their chunks."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
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
                f'"finish_reason":{finish_json(delta)}{beam_score_json(delta)}}}',
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
