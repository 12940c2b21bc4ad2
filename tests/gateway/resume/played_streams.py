"""Resumable streams of an engine that plays given tokens, and what clients make of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from shared.messages.endings import EndFlag
from shared.messages.outputs import RequestEnded
from shared.messages.requests import Attach, Submit
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.fake_engine import FakeEngine, Row, scores

TEXT = "né 😀 one STOP two"


class Played:
    """An engine that answers one call's requests, and every Attach as a scheduler does.

    Args:
        tokens: of each choice; the last one ends it.
        flag: how it ends.
    """

    def __init__(
        self,
        engine: FakeEngine,
        *tokens: Sequence[int],
        scored: bool = False,
        flag: EndFlag = EndFlag.LENGTH,
    ) -> None:
        self.engine = engine
        self.tokens = [list(some) for some in tokens]
        self.scored = scored
        self.flag = flag
        self.known: dict[str, Submit] = {}

    async def serve(self) -> None:
        """Until cancelled."""
        while True:
            message = await self.engine.read()
            if isinstance(message, Submit):
                self.known[message.request_id] = message
                await self.engine.accept(message)
                await self._generate(message, [0] * len(self.tokens))
            elif isinstance(message, Attach):
                await self._answer(message)

    async def _answer(self, attach: Attach) -> None:
        submit = self.known.get(attach.request_id) or attach.submit
        if submit is None:
            cursor = str(self.engine.requests_cursor)
            await self.engine.append(RequestEnded(attach.request_id, "unknown", "", cursor))
            return
        self.known[attach.request_id] = submit
        if not attach.exact:
            done = dict.fromkeys(range(len(self.tokens)), self.flag.finish_reason().value)
            await self.engine.accept_attach(attach, *self.tokens, submit=submit, ended=done)
            return
        views = [view.tokens.tolist() for view in attach.views] or [[] for _ in self.tokens]
        ended = {n: view.finish_reason for n, view in enumerate(attach.views) if view.finish_reason}
        going_on = {len(view) for number, view in enumerate(views) if number not in ended}
        assert len(going_on) <= 1, "a scheduler lets choices go on side by side only"
        submit = await self.engine.accept_attach(attach, *views, submit=submit, ended=ended)
        starts = [len(view) for view in views]
        for number in ended:
            starts[number] = len(self.tokens[number])
        await self._generate(submit, starts)

    async def _generate(self, submit: Submit, starts: Sequence[int]) -> None:
        prompts: Mapping[Row, Any] = {}
        if submit.sampling.num_prompt_logprobs is not None:
            found = [scores(token, -1.0, {}, row=n) for n, token in enumerate(submit.prompt)]
            prompts = {submit.request_id: found[1:]}
        for position in range(max(map(len, self.tokens))):
            step: dict[Row, int] = {}
            ended: dict[Row, EndFlag] = {}
            for number, tokens in enumerate(self.tokens):
                row = (submit.request_id, number)
                if starts[number] <= position < len(tokens):
                    step[row] = tokens[position]
                    if position == len(tokens) - 1:
                        ended[row] = self.flag
            found_scores = {row: scores(t, -0.25 * t, {}) for row, t in step.items()}
            await self.engine.step(
                step, ended, found_scores if self.scored else None, prompts if step else None
            )
            prompts = {}


async def two_gateways(make_stage: MakeStage) -> tuple[Stage, Stage]:
    """Of one engine, which the first of them has."""
    stage = await make_stage()
    other = await make_stage(bus=stage.engine.bus)
    await stage.engine.start_epoch()
    await stage.engine.publish()
    return stage, other


def parsed(text: str) -> list[tuple[str, str]]:
    """Id and data of every event."""
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(lines) == {"id", "data"}, block
        found.append((lines["id"], lines["data"]))
    return found


def shown(datas: Sequence[str]) -> dict[int, list[Any]]:
    """Everything that a client can put together of each choice; usage stands at -1."""
    found: dict[int, list[Any]] = {}
    for data in datas:
        if data == "[DONE]":
            continue
        event = json.loads(data)
        if not event["choices"]:
            found[-1] = [event["usage"]]
        for choice in event["choices"]:
            parts = found.setdefault(choice["index"], ["", [], [], [], []])
            delta = choice.get("delta", {})
            parts[0] += choice.get("text", "") + delta.get("content", "")
            parts[1] += [delta["role"]] if "role" in delta else []
            parts[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
            logprobs = choice["logprobs"] or {}
            parts[3] += logprobs.get("tokens", []) + logprobs.get("content", [])
            parts[3] += logprobs.get("text_offset", [])
            parts[4] += choice.get("token_ids", []) + choice.get("prompt_token_ids", [])
    return found


def choices_in(data: str) -> list[Any]:
    return [] if data == "[DONE]" else json.loads(data)["choices"]


async def resumable(stage: Stage, **body: Any) -> httpx.Response:
    return await stage.complete(stream=True, stream_resume=True, **body)


async def post(stage: Stage, key: str = "k", **body: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key, **body.pop("headers", {})}
    return await stage.http.post(
        "/v1/completions", json={"model": "demo", "prompt": "Hello", **body}, headers=headers
    )
