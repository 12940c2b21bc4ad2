"""Streams that are continued after any of their events, by the same gateway or by another one."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import pytest

from gateway.resume.event_ids import Position
from gateway.resume.stream_ids import call_id_of, secret_of_key, stream_id_of
from shared.bus.memory import MemoryBus
from shared.messages.endings import EndFlag
from shared.messages.outputs import BeamsEnded, RequestEnded
from shared.messages.requests import Abort, Attach, Submit
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.fake_engine import FakeEngine, Row, hypothesis, scores

TEXT = "né 😀 one STOP two"


class Played:
    """An engine that answers one call's requests, and every Attach as a scheduler does.

    Args:
        tokens: of each choice; the last one ends it.
    """

    def __init__(self, engine: FakeEngine, *tokens: Sequence[int], scored: bool = False) -> None:
        self.engine = engine
        self.tokens = [list(some) for some in tokens]
        self.scored = scored
        self.known: dict[str, Submit] = {}

    async def serve(self) -> None:
        """Until cancelled."""
        while True:
            message = await self.engine.hear()
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
            await self.engine.say(RequestEnded(attach.request_id, "unknown", "", cursor))
            return
        self.known[attach.request_id] = submit
        if not attach.exact:
            done = dict.fromkeys(range(len(self.tokens)), "length")
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
                        ended[row] = EndFlag.LENGTH
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


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("complete", {}),
    "stop strings": ("complete", {"stop": ["STOP", "ne S"]}),
    "two choices": ("complete", {"n": 2, "stop": "STOP"}),
    "echo": ("complete", {"echo": True, "n": 2}),
    "log-probabilities": ("complete", {"logprobs": 0}),
    "echo with log-probabilities": ("complete", {"echo": True, "logprobs": 0}),
    "token ids": ("complete", {"return_token_ids": True, "n": 2}),
    "prompts": (
        "complete",
        {
            "prompt": ["Hello", "Hi"],
            "n": 2,
            "stop": "STOP",
            "stream_options": {"include_usage": True},
        },
    ),
    "usage": ("complete", {"stream_options": {"include_usage": True}, "n": 2}),
    "chat": ("chat", {"n": 2, "stop": "STOP"}),
    "stop strings in the text": (
        "complete",
        {"n": 2, "stop": ["STOP", "ne S"], "include_stop_str_in_output": True},
    ),
    "usage in every chunk": (
        "complete",
        {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "the end of a prompt": ("complete", {"truncate_prompt_tokens": 2, "echo": True}),
    "chat with everything": (
        "chat",
        {"n": 2, "logprobs": True, "return_token_ids": True, "stop": "two"},
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_stream_cut_after_any_event_has_the_same_text(
    make_stage: MakeStage, case: str
) -> None:
    way, body = CASES[case]
    stage, other = await two_gateways(make_stage)
    texts = [TEXT, "other 😀 ST STOP"][: body.get("n", 1)]
    tokens = [stage.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    played = Played(stage.engine, *tokens, scored=bool(body.get("logprobs") is not None))
    stage.spawn(played.serve())
    body = {"stream": True, "stream_resume": True, "max_tokens": 60, **body}
    response = await getattr(stage, way)(**body)
    url = response.headers["x-stream-url"]
    events = parsed(response.text)
    assert events[-1][1] == "[DONE]"
    whole = shown([data for _, data in events])
    assert "".join(str(parts[0]) for parts in whole.values() if len(parts) > 1)
    for cut in range(len(events) - 1):
        last, before = events[cut][0], [data for _, data in events[: cut + 1]]
        gateway = (stage, other)[cut % 2]
        rest = await gateway.http.get(url, headers={"Last-Event-ID": last})
        assert rest.status_code == 200, rest.text
        more = parsed(rest.text)
        assert more[-1][1] == "[DONE]"
        assert shown([*before, *(data for _, data in more)]) == whole, (cut, last)
    again = await other.http.get(url)
    assert shown([data for _, data in parsed(again.text)]) == whole
    nothing = await other.http.get(url, headers={"Last-Event-ID": events[-1][0]})
    assert nothing.status_code == 204


async def test_scored_choices_of_different_lengths_go_on_behind_what_the_client_has_of_each(
    make_stage: MakeStage,
) -> None:
    stage, other = await two_gateways(make_stage)
    texts = ("one of the two answers", "the other one of them")
    tokens = [stage.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    stage.spawn(Played(stage.engine, *tokens, scored=True).serve())
    body = {"n": 2, "logprobs": True, "return_token_ids": True, "max_tokens": 60}
    response = await stage.chat(stream=True, stream_resume=True, **body)
    has = ".".join(
        str(Position().after(own[:count])) for own, count in zip(tokens, (5, 2), strict=True)
    )
    url = response.headers["x-stream-url"]
    rest = await other.http.get(url, headers={"Last-Event-ID": f"{has}~0"})
    found = shown([data for _, data in parsed(rest.text)])
    assert [found[0][4], found[1][4]] == [tokens[0][5:], tokens[1][2:]]
    assert [len(found[0][3]), len(found[1][3])] == [len(tokens[0]) - 5, len(tokens[1]) - 2]


async def two_prompts_cut(
    make_stage: MakeStage, n: int
) -> tuple[Played, Stage, str, list[tuple[str, str]], int]:
    """A whole stream of two prompts with n choices, and where the first has ended in it."""
    stage, other = await two_gateways(make_stage)
    texts = ("one of the two", "the other STOP")[:n]
    tokens = [stage.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    played = Played(stage.engine, *tokens)
    stage.spawn(played.serve())
    body = {"n": n, "stop": "STOP", "echo": True, "stream_options": {"include_usage": True}}
    response = await resumable(stage, prompt=["Hello", "Hi you"], **body)
    events = parsed(response.text)
    cut = max(
        number
        for number, (_, data) in enumerate(events)
        if any(choice["index"] < n and choice["finish_reason"] for choice in choices_in(data))
    )
    assert any(choices_in(data) for _, data in events[cut + 1 :])
    return played, other, response.headers["x-stream-url"], events, cut


def choices_in(data: str) -> list[Any]:
    return [] if data == "[DONE]" else json.loads(data)["choices"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_prompt_that_is_forgotten_is_not_missed_by_who_has_all_of_it(
    make_stage: MakeStage, n: int
) -> None:
    played, other, url, events, cut = await two_prompts_cut(make_stage, n)
    first, second = played.known
    whole = shown([data for _, data in events])
    del played.known[first]
    rest = await other.http.get(url, headers={"Last-Event-ID": events[cut][0]})
    assert rest.status_code == 200, rest.text
    more = [data for _, data in parsed(rest.text)]
    assert shown([data for _, data in events[: cut + 1]] + more) == whole
    nothing = "." * (2 * n - 1) + "~0"
    for last in ({}, {"Last-Event-ID": nothing}):
        assert (await other.http.get(url, headers=last)).status_code == 410
    del played.known[second]
    gone = await other.http.get(url, headers={"Last-Event-ID": events[cut][0]})
    assert gone.status_code == 410


async def test_a_later_prompt_may_be_forgotten_before_the_first(make_stage: MakeStage) -> None:
    played, other, url, events, _ = await two_prompts_cut(make_stage, 1)
    del played.known[list(played.known)[1]]
    ended = events[-1][0].split("~")[0].split(".")[1]
    rest = await other.http.get(url, headers={"Last-Event-ID": f".{ended}~0"})
    found = shown([data for _, data in parsed(rest.text)])
    whole = shown([data for _, data in events])
    assert found == {0: whole[0], -1: whole[-1]}
    assert (await other.http.get(url, headers={"Last-Event-ID": ".~0"})).status_code == 410


async def test_how_many_requests_are_looked_for_has_a_limit(make_stage: MakeStage) -> None:
    stage = await make_stage(max_prompts=3)
    stage.spawn(Played(stage.engine).serve())
    forgotten = f"/v1/streams/{stream_id_of('0' * 32, client='')}"
    many = ".".join([str(Position(ended=True, begun=True))] * 100)
    response = await stage.http.get(forgotten, headers={"Last-Event-ID": f"{many}~0"})
    assert response.status_code == 410
    assert len(stage.engine.heard) == 3


async def resumable(stage: Stage, **body: Any) -> httpx.Response:
    return await stage.complete(stream=True, stream_resume=True, **body)


async def test_a_stream_that_is_not_remembered_is_gone(stage: Stage) -> None:
    stage.spawn(Played(stage.engine).serve())
    forgotten = stream_id_of("0" * 32, client="")
    assert (await stage.http.get(f"/v1/streams/{forgotten}")).status_code == 410


async def test_only_streams_that_were_to_be_resumable_can_be_resumed(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("ab", add_special_tokens=False)
    played = Played(stage.engine, tokens)
    stage.spawn(played.serve())
    response = await post(stage, stream=True)
    assert "x-stream-url" not in response.headers
    assert "id: " not in response.text
    guessed = stream_id_of(secret_of_key("k"), client="")
    assert (await stage.http.get(f"/v1/streams/{guessed}")).status_code == 404
    assert len(played.known) == 1


async def test_a_foreign_stream_is_like_one_that_never_was_and_the_engine_is_not_asked(
    stage: Stage,
) -> None:
    tokens = stage.tokenizer.encode("ab", add_special_tokens=False)
    played = Played(stage.engine, tokens)
    stage.spawn(played.serve())
    url = (await resumable(stage)).headers["x-stream-url"]
    stranger = {"Authorization": "Bearer other"}
    foreign = await stage.http.get(url, headers=stranger)
    nonsense = await stage.http.get("/v1/streams/nonsense", headers=stranger)
    never = await stage.http.get(f"/v1/streams/{'0' * 48}", headers=stranger)
    assert foreign.status_code == nonsense.status_code == never.status_code == 404
    assert foreign.content == nonsense.content == never.content
    assert (await stage.http.get(url)).status_code == 200
    asked = {message.request_id for message in stage.engine.heard if isinstance(message, Attach)}
    assert asked == set(played.known), "nobody else's question reached the engine"


async def test_a_stranger_who_forges_the_name_of_a_stream_asks_for_another_one(
    stage: Stage,
) -> None:
    tokens = stage.tokenizer.encode("ab", add_special_tokens=False)
    played = Played(stage.engine, tokens)
    stage.spawn(played.serve())
    url = (await resumable(stage)).headers["x-stream-url"]
    secret = url.removeprefix("/v1/streams/")[:32]
    [request_id] = played.known
    assert request_id == call_id_of(secret, client="")
    forged = stream_id_of(secret, client="Bearer other")
    headers = {"Authorization": "Bearer other"}
    response = await stage.http.get(f"/v1/streams/{forged}", headers=headers)
    assert response.status_code == 410
    attach = stage.engine.heard[-1]
    assert isinstance(attach, Attach)
    assert attach.request_id != request_id


@dataclass
class HeldAborts:
    """Aborts that were to be sent later: by how many seconds, and a way to send them now."""

    delays_s: list[float] = field(default_factory=list)
    sends: list[Callable[[], object]] = field(default_factory=list)

    def send(self) -> None:
        for send in self.sends:
            send()


@pytest.fixture
def held_aborts(monkeypatch: pytest.MonkeyPatch) -> HeldAborts:
    held = HeldAborts()
    real = asyncio.BaseEventLoop.call_later

    def call_later(
        loop: asyncio.BaseEventLoop, delay: float, callback: Any, *args: Any, **context: Any
    ) -> asyncio.TimerHandle:
        if not (args and isinstance(args[0], Abort)):
            return real(loop, delay, callback, *args, **context)
        held.delays_s.append(delay)
        held.sends.append(partial(callback, *args))
        return real(loop, 3_600, lambda: None)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", call_later)
    return held


async def test_who_leaves_while_a_stream_is_looked_for_may_come_back_for_a_while(
    make_stage: MakeStage, held_aborts: HeldAborts
) -> None:
    stage = await make_stage(resume_window=50)
    stream_id = stream_id_of("0" * 32, client="")
    leaving = stage.spawn(stage.http.get(f"/v1/streams/{stream_id}"))
    attach = await stage.engine.hear_attach()
    leaving.cancel()
    await stage.until(lambda: stage.server.service.engine.num_open == 0)
    assert held_aborts.delays_s == [50]
    held_aborts.send()
    abort = await stage.engine.hear_abort()
    assert (abort.request_id, abort.attachment) == (attach.request_id, attach.attachment)


@pytest.mark.parametrize("last", ["nonsense", "1b00000000.1b00000000~0"])
async def test_an_id_of_another_stream_is_refused(stage: Stage, last: str) -> None:
    tokens = stage.tokenizer.encode("ab", add_special_tokens=False)
    stage.spawn(Played(stage.engine, tokens).serve())
    url = (await resumable(stage)).headers["x-stream-url"]
    response = await stage.http.get(url, headers={"Last-Event-ID": last})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Last-Event-ID"


@pytest.mark.parametrize(
    ("last", "status"),
    [("1b00000000.~0", 500), (".1b00000000~0", 500), ("1b00000000~0", 400)],
)
async def test_what_could_not_be_resumed_is_aborted_after_a_while_unless_somebody_comes(
    make_stage: MakeStage, last: str, status: int, held_aborts: HeldAborts
) -> None:
    stage = await make_stage(resume_window=50)
    engine, service = stage.engine, stage.server.service
    tokens = stage.tokenizer.encode("abcd", add_special_tokens=False)
    older = stage.spawn(post(stage, stream=True, stream_resume=True, prompt=["one", "two"]))
    submits = [await engine.accept_attach(await engine.hear_attach(), [], ended={}) for _ in "12"]
    url = f"/v1/streams/{stream_id_of(secret_of_key('k'), client='')}"
    failing = stage.spawn(stage.http.get(url, headers={"Last-Event-ID": last}))
    for submit in submits[: 2 if status == 500 else 1]:
        await engine.accept_attach(await engine.hear_attach(), tokens[:2], submit=submit)
    assert (await failing).status_code == status
    await older
    assert service.engine.num_open == 0
    metrics = (await stage.http.get("/metrics")).text
    assert re.search(r"open_streams{[^}]*} 0.0", metrics)
    assert set(held_aborts.delays_s) == {50}
    held_aborts.send()
    aborts: list[Abort] = []
    while len(aborts) < len(submits):
        message = await engine.hear()
        aborts += [message] if isinstance(message, Abort) else []
    assert {abort.request_id for abort in aborts} == {submit.request_id for submit in submits}


async def test_a_stream_is_not_continued_with_another_history(stage: Stage) -> None:
    first, second = (stage.tokenizer.encode(t, add_special_tokens=False) for t in ("abc", "axc"))
    played = Played(stage.engine, first)
    stage.spawn(played.serve())
    response = await resumable(stage)
    url, events = response.headers["x-stream-url"], parsed(response.text)
    played.tokens = [list(second)]
    rest = await stage.http.get(url, headers={"Last-Event-ID": events[-2][0]})
    assert "[DONE]" not in rest.text
    assert "history" in rest.text


async def test_tokens_that_the_log_lost_are_waited_for_and_compared(stage: Stage) -> None:
    engine = stage.engine
    tokens = stage.tokenizer.encode("a1b2c3d4", add_special_tokens=False)
    played = Played(engine, tokens)
    serving = stage.spawn(played.serve())
    url = (await resumable(stage)).headers["x-stream-url"]
    serving.cancel()
    [submit] = played.known.values()
    seen = f"{Position().after(tokens[:3])}~0"
    waiting = stage.spawn(stage.http.get(url, headers={"Last-Event-ID": seen}))
    await engine.accept_attach(await engine.hear_attach(), tokens[:1], submit=submit, ended={})
    attach = await engine.hear_attach()
    assert attach.views[0].tokens.tolist() == tokens[:1]
    submit = await engine.accept_attach(attach, submit=submit)
    await engine.generate(submit, tokens[1:])
    rest = shown([data for _, data in parsed((await waiting).text)])
    assert stage.tokenizer.decode(tokens[:3]) + rest[0][0] == "a1b2c3d4"


async def test_a_resumable_stream_outlives_its_client_for_a_while(make_stage: MakeStage) -> None:
    stage = await make_stage(resume_window=0.2)
    accepting = stage.spawn(stage.engine.accept_next())
    async with stage.http.stream(
        "POST",
        "/v1/completions",
        json={"model": "demo", "prompt": "Hi", "stream": True, "stream_resume": True},
    ):
        submit = await accepting
    assert stage.server.service.engine.num_open == 1
    abort = await stage.engine.hear_abort()
    assert abort.attachment == submit.attachment


async def test_who_resumes_a_stream_ends_its_older_delivery_quietly(stage: Stage) -> None:
    engine = stage.engine
    tokens = stage.tokenizer.encode("abcd", add_special_tokens=False)
    older = stage.spawn(post(stage, stream=True, stream_resume=True))
    submit = await engine.accept_attach(await engine.hear_attach(), [], ended={})
    await engine.generate(submit, tokens[:1], flag=None)
    stream_id = stream_id_of(secret_of_key("k"), client="")
    newer = stage.spawn(stage.http.get(f"/v1/streams/{stream_id}"))
    for _ in range(2):
        await engine.accept_attach(await engine.hear_attach(), tokens[:1], submit=submit)
    await engine.generate(submit, tokens[1:])
    datas = [data for _, data in parsed((await newer).text)]
    assert shown(datas)[0][0] == "abcd"
    assert "[DONE]" not in (await older).text
    assert "error" not in (await older).text
    assert not any(isinstance(message, Abort) for message in engine.heard)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_who_resumes_a_stream_of_several_prompts_gets_all_of_them(
    make_stage: MakeStage, elsewhere: bool
) -> None:
    stage, other = await two_gateways(make_stage)
    engine, prompts = stage.engine, ["one", "two"]
    tokens = stage.tokenizer.encode("abcd", add_special_tokens=False)
    older = stage.spawn(post(stage, stream=True, stream_resume=True, prompt=prompts))
    submits = [await engine.accept_attach(await engine.hear_attach(), [], ended={}) for _ in "12"]
    stream_id = stream_id_of(secret_of_key("k"), client="")
    newer = stage.spawn((other if elsewhere else stage).http.get(f"/v1/streams/{stream_id}"))
    await engine.accept_attach(await engine.hear_attach(), [], submit=submits[0])
    assert "[DONE]" not in (await older).text
    # The older one knows by now, and the newer one has not asked for the other prompt's yet.
    for submit in (submits[1], *submits):
        attach = await engine.hear_attach()
        assert attach.request_id == submit.request_id
        await engine.accept_attach(attach, [], submit=submit)
    for submit in submits:
        await engine.generate(submit, tokens)
    found = shown([data for _, data in parsed((await newer).text)])
    assert [found[0][0], found[1][0]] == ["abcd", "abcd"]
    assert not any(isinstance(message, Abort) for message in engine.heard)


async def test_what_nobody_takes_over_of_a_stream_is_aborted_after_a_while(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(resume_window=0.2)
    engine = stage.engine
    older = stage.spawn(post(stage, stream=True, stream_resume=True, prompt=["one", "two"]))
    submits = [await engine.accept_attach(await engine.hear_attach(), [], ended={}) for _ in "12"]
    stream_id = stream_id_of(secret_of_key("k"), client="")
    leaving = stage.spawn(stage.http.get(f"/v1/streams/{stream_id}"))
    await engine.hear_attach()
    await older
    leaving.cancel()
    aborts = [await engine.hear_abort() for _ in "12"]
    assert {abort.request_id for abort in aborts} == {submit.request_id for submit in submits}


@pytest.mark.parametrize("num_seen", [0, 1, 2])
async def test_a_beam_search_that_has_ended_is_shown_from_where_it_was_cut(
    stage: Stage, num_seen: int
) -> None:
    engine = stage.engine
    texts = [stage.tokenizer.encode(text, add_special_tokens=False) for text in ("one", "other")]
    found = [hypothesis(tokens) for tokens in texts]
    waiting = stage.spawn(resumable(stage, use_beam_search=True, n=2))
    submit = await engine.accept_search()
    await engine.end_search(submit, *found)
    response = await waiting
    events = parsed(response.text)
    assert len(events) == 3
    last = {"Last-Event-ID": events[num_seen - 1][0]} if num_seen else {}
    again = stage.spawn(stage.http.get(response.headers["x-stream-url"], headers=last))
    for _ in range(2 if num_seen < 2 else 1):
        attach = await engine.hear_attach()
        known = replace(submit, attachment=attach.attachment)
        end = BeamsEnded(submit.request_id, tuple(found), str(engine.requests_cursor))
        await engine.say(engine.search_state(known), end)
    rest = [data for _, data in parsed((await again).text)]
    assert rest[-1] == "[DONE]"
    assert shown([data for _, data in events[:num_seen]] + rest) == shown(
        [data for _, data in events]
    )


# -------------------------------------------------------------- Idempotency-Key


async def post(stage: Stage, key: str = "k", **body: Any) -> httpx.Response:
    headers = {"Idempotency-Key": key, **body.pop("headers", {})}
    return await stage.http.post(
        "/v1/completions", json={"model": "demo", "prompt": "Hello", **body}, headers=headers
    )


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
async def test_a_repeated_call_joins_the_first_from_its_beginning(
    make_stage: MakeStage, first: bool, second: bool
) -> None:
    stage, other = await two_gateways(make_stage)
    tokens = stage.tokenizer.encode("only once", add_special_tokens=False)
    played = Played(stage.engine, tokens)
    stage.spawn(played.serve())
    one = await post(stage, temperature=1.0, stream=first)
    two = await post(other, temperature=1.0, stream=second)
    assert len(played.known) == 1
    for response, streams in ((one, first), (two, second)):
        if streams:
            datas = [block.removeprefix("data: ") for block in response.text.split("\n\n")[:-1]]
            assert (shown(datas)[0][0], datas[-1]) == ("only once", "[DONE]")
        else:
            assert response.json()["choices"][0]["text"] == "only once"
    assert one.headers["x-request-id"] == two.headers["x-request-id"]


async def test_a_key_stands_for_one_body_of_one_client(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("ab", add_special_tokens=False)
    played = Played(stage.engine, tokens)
    stage.spawn(played.serve())
    assert (await post(stage)).status_code == 200
    other = await post(stage, max_tokens=3)
    assert other.status_code == 422
    assert "Idempotency-Key" in other.json()["error"]["message"]
    assert (await post(stage, n=2)).status_code == 422
    assert (await post(stage, n=2, stream=True)).status_code == 422
    assert not any(isinstance(message, Abort) for message in stage.engine.heard)
    headers = {"Authorization": "Bearer another"}
    assert (await post(stage, max_tokens=3, headers=headers)).status_code == 200
    assert (await post(stage, key="another", max_tokens=3)).status_code == 200
    assert len(played.known) == 3


async def test_another_body_does_not_disturb_the_call_that_has_the_key(stage: Stage) -> None:
    engine = stage.engine
    waiting = stage.spawn(post(stage))
    submit = await engine.accept_attach(await engine.hear_attach(), [], ended={})
    assert (await post(stage, max_tokens=3)).status_code == 422
    await engine.generate(submit, stage.tokenizer.encode("ab", add_special_tokens=False))
    assert (await waiting).json()["choices"][0]["text"] == "ab"


async def test_a_client_that_leaves_does_not_end_what_another_call_delivers(stage: Stage) -> None:
    engine = stage.engine
    first = stage.spawn(post(stage))
    await engine.accept_attach(await engine.hear_attach(), [], ended={})
    second = stage.spawn(post(stage))
    attach = await engine.hear_attach()
    assert (await first).status_code == 409
    submit = await engine.accept_attach(attach, [], ended={})
    await engine.generate(submit, stage.tokenizer.encode("ab", add_special_tokens=False))
    assert (await second).json()["choices"][0]["text"] == "ab"
    assert not any(isinstance(message, Abort) for message in engine.heard)


async def test_an_engine_that_does_not_answer_a_repeated_call_is_a_503(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(bus=MemoryBus(lambda: 1_000), bus_patience=0.2)
    response = await post(stage)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    attach = await stage.engine.hear_attach()
    assert (await stage.engine.hear_abort()).attachment == attach.attachment


async def test_a_client_that_leaves_before_a_repeated_call_is_answered_aborts_it(
    stage: Stage,
) -> None:
    leaving = stage.spawn(post(stage))
    attach = await stage.engine.hear_attach()
    leaving.cancel()
    assert (await stage.engine.hear_abort()).attachment == attach.attachment
    await stage.until(lambda: stage.server.service.engine.num_open == 0)


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_that_cannot_be_used_is_a_400(stage: Stage, key: str) -> None:
    response = await post(stage, key=key)
    assert response.status_code == 400
    assert "Idempotency-Key" in response.json()["error"]["message"]


async def test_only_streams_can_be_resumable(stage: Stage) -> None:
    response = await stage.complete(stream_resume=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_resume"
