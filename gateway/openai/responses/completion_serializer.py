"""Serializes answers of /v1/completions."""

import json
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from gateway.openai.responses.logprobs import finite, prompt_logprobs_body
from gateway.openai.responses.serializer import (
    AnswerHead,
    Frame,
    OpenAIStreamEnd,
    StreamEvent,
    Usage,
    beam_score,
    beam_score_json,
    finish_json,
)
from gateway.prompts.prompt_logprobs import PromptScores
from gateway.text.choice_text import Delta, ScoredToken
from gateway.text.tokenizer import Tokenizer


class CompletionSerializer(OpenAIStreamEnd):
    """Writes ``text_completion`` objects."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._frame = Frame(head, "text_completion", "text_completion")
        self._begun: set[int] = set()

    def resume(self, begun: Iterable[int]) -> None:
        self._begun.update(begun)

    def chunk(self, index: int, delta: Delta, usage: Usage | None) -> list[StreamEvent]:
        extra = beam_score_json(delta)
        if self._head.token_ids:
            fields: dict[str, Any] = {"token_ids": delta.token_ids}
            if index not in self._begun:
                fields["prompt_token_ids"] = self._head.prompt_tokens[index]
                self._begun.add(index)
            extra += "," + json.dumps(fields)[1:-1]
        data = self._frame.event(
            f'{{"index":{index},"text":{encode_basestring_ascii(delta.text)},'
            f'"logprobs":{self._logprobs_json(delta.scored)},'
            f'"finish_reason":{finish_json(delta)}{extra}}}',
            usage,
        )
        return [StreamEvent(data, True, delta.finish_reason is not None)]

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frame.event("", usage)

    def whole(
        self, choices: Sequence[Delta], usage: Usage, prompts: Sequence[PromptScores]
    ) -> bytes:
        scored = [prompt_logprobs_body(scores, self._tokenizer) for scores in prompts]
        shown = []
        for index, delta in enumerate(choices):
            choice: dict[str, Any] = {
                "index": index,
                "text": delta.text,
                "logprobs": self._logprobs(delta.scored),
                "finish_reason": delta.finish_reason,
                **beam_score(delta),
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
                name(token): finite(logprob)
                for token, logprob in zip(
                    item.scores.top_ids.tolist(), item.scores.top_logprobs.tolist(), strict=True
                )
            }
            # The chosen token is always listed, even if it is not among the likeliest.
            best.setdefault(name(item.token), finite(item.scores.logprob))
            top.append(best)
        return {
            "tokens": [name(item.token) for item in scored],
            "token_logprobs": [
                None if item.scores is None else finite(item.scores.logprob) for item in scored
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
