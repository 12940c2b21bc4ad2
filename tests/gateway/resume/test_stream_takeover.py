"""Streams whose clients leave, come back, or are replaced by newer calls."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive

from gateway.openai.responses.answers import StreamAnswer
from gateway.resume.event_ids import Position
from gateway.resume.stream_ids import secret_of_key, stream_id_of
from shared.messages.outputs import BeamsEnded
from shared.messages.requests import Abort
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.fake_engine import hypothesis
from tests.gateway.resume.played_streams import (
    Played,
    parsed,
    post,
    resumable,
    shown,
    two_gateways,
)


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


async def test_a_client_that_leaves_while_its_stream_is_looked_up_may_come_back_for_a_while(
    make_stage: MakeStage, held_aborts: HeldAborts
) -> None:
    stage = await make_stage(resume_window=50)
    stream_id = stream_id_of("0" * 32, client="")
    leaving = stage.spawn(stage.http.get(f"/v1/streams/{stream_id}"))
    attach = await stage.engine.read_attach()
    leaving.cancel()
    await stage.until(lambda: stage.model.engine.num_open == 0)
    assert held_aborts.delays_s == [50]
    held_aborts.send()
    abort = await stage.engine.read_abort()
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
async def test_a_request_that_could_not_be_resumed_is_aborted_unless_a_client_comes_back_in_time(
    make_stage: MakeStage, last: str, status: int, held_aborts: HeldAborts
) -> None:
    stage = await make_stage(resume_window=50)
    engine = stage.engine
    tokens = stage.tokenizer.encode("abcd", add_special_tokens=False)
    older = stage.spawn(post(stage, stream=True, stream_resume=True, prompt=["one", "two"]))
    submits = [await engine.accept_attach(await engine.read_attach(), [], ended={}) for _ in "12"]
    url = f"/v1/streams/{stream_id_of(secret_of_key('k'), client='')}"
    failing = stage.spawn(stage.http.get(url, headers={"Last-Event-ID": last}))
    for submit in submits[: 2 if status == 500 else 1]:
        await engine.accept_attach(await engine.read_attach(), tokens[:2], submit=submit)
    assert (await failing).status_code == status
    await older
    assert stage.model.engine.num_open == 0
    metrics = (await stage.http.get("/metrics")).text
    assert re.search(r"open_streams{[^}]*} 0.0", metrics)
    assert set(held_aborts.delays_s) == {50}
    held_aborts.send()
    aborts: list[Abort] = []
    while len(aborts) < len(submits):
        message = await engine.read()
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
    await engine.accept_attach(await engine.read_attach(), tokens[:1], submit=submit, ended={})
    attach = await engine.read_attach()
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
    assert stage.model.engine.num_open == 1
    abort = await stage.engine.read_abort()
    assert abort.attachment == submit.attachment


async def test_a_client_that_leaves_before_it_has_the_url_of_its_stream_aborts_it(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection closes when the engine has accepted, and the head was not sent."""
    stage = await make_stage(resume_window=0.2)
    host, port = stage.url.removeprefix("http://").split(":")
    clients: list[asyncio.StreamWriter] = []
    accepted = StreamAnswer.accepted

    async def closed_when_accepted(answer: StreamAnswer, receive: Receive) -> Response:
        response = await accepted(answer, receive)
        clients.pop().transport.abort()
        await stage.until(lambda: not stage.server.connections)
        return response

    monkeypatch.setattr(StreamAnswer, "accepted", closed_when_accepted)
    body = json.dumps({"model": "demo", "prompt": "Hi", "stream": True, "stream_resume": True})
    reasons = []
    for key in ("", "Idempotency-Key: k\r\n"):
        _reader, writer = await asyncio.open_connection(host, int(port))
        clients.append(writer)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}{key}\r\n{body}".encode())
        if key:
            await stage.engine.accept_attach(await stage.engine.read_attach(), [], ended={})
        else:
            await stage.engine.accept_next()
        reasons.append((await stage.engine.read_abort()).reason)
    assert reasons == ["client disconnected", "not finished"], "the second one after the window"


async def test_resuming_a_stream_ends_its_older_delivery_without_an_error(stage: Stage) -> None:
    engine = stage.engine
    tokens = stage.tokenizer.encode("abcd", add_special_tokens=False)
    older = stage.spawn(post(stage, stream=True, stream_resume=True))
    submit = await engine.accept_attach(await engine.read_attach(), [], ended={})
    await engine.generate(submit, tokens[:1], flag=None)
    stream_id = stream_id_of(secret_of_key("k"), client="")
    newer = stage.spawn(stage.http.get(f"/v1/streams/{stream_id}"))
    for _ in range(2):
        await engine.accept_attach(await engine.read_attach(), tokens[:1], submit=submit)
    await engine.generate(submit, tokens[1:])
    datas = [data for _, data in parsed((await newer).text)]
    assert shown(datas)[0][0] == "abcd"
    assert "[DONE]" not in (await older).text
    assert "error" not in (await older).text
    assert not any(isinstance(message, Abort) for message in engine.received)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_resuming_a_stream_of_several_prompts_gives_all_of_them(
    make_stage: MakeStage, elsewhere: bool
) -> None:
    stage, other = await two_gateways(make_stage)
    engine, prompts = stage.engine, ["one", "two"]
    tokens = stage.tokenizer.encode("abcd", add_special_tokens=False)
    older = stage.spawn(post(stage, stream=True, stream_resume=True, prompt=prompts))
    submits = [await engine.accept_attach(await engine.read_attach(), [], ended={}) for _ in "12"]
    stream_id = stream_id_of(secret_of_key("k"), client="")
    newer = stage.spawn((other if elsewhere else stage).http.get(f"/v1/streams/{stream_id}"))
    await engine.accept_attach(await engine.read_attach(), [], submit=submits[0])
    assert "[DONE]" not in (await older).text
    # The older one knows by now, and the newer one has not asked for the other prompt's yet.
    for submit in (submits[1], *submits):
        attach = await engine.read_attach()
        assert attach.request_id == submit.request_id
        await engine.accept_attach(attach, [], submit=submit)
    for submit in submits:
        await engine.generate(submit, tokens)
    found = shown([data for _, data in parsed((await newer).text)])
    assert [found[0][0], found[1][0]] == ["abcd", "abcd"]
    assert not any(isinstance(message, Abort) for message in engine.received)


async def test_requests_of_a_stream_that_no_client_takes_over_are_aborted_after_a_while(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(resume_window=0.2)
    engine = stage.engine
    older = stage.spawn(post(stage, stream=True, stream_resume=True, prompt=["one", "two"]))
    submits = [await engine.accept_attach(await engine.read_attach(), [], ended={}) for _ in "12"]
    stream_id = stream_id_of(secret_of_key("k"), client="")
    leaving = stage.spawn(stage.http.get(f"/v1/streams/{stream_id}"))
    await engine.read_attach()
    await older
    leaving.cancel()
    aborts = [await engine.read_abort() for _ in "12"]
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
        attach = await engine.read_attach()
        known = replace(submit, attachment=attach.attachment)
        end = BeamsEnded(submit.request_id, tuple(found), str(engine.requests_cursor))
        await engine.append(engine.search_state(known), end)
    rest = [data for _, data in parsed((await again).text)]
    assert rest[-1] == "[DONE]"
    assert shown([data for _, data in events[:num_seen]] + rest) == shown(
        [data for _, data in events]
    )


async def test_a_delete_ends_a_stream_at_once(stage: Stage) -> None:
    older = stage.spawn(post(stage, stream=True, stream_resume=True))
    submit = await stage.engine.accept_attach(await stage.engine.read_attach(), [], ended={})
    url = f"/v1/streams/{stream_id_of(secret_of_key('k'), client='')}"
    ending = stage.spawn(stage.http.delete(url))
    attach = await stage.engine.read_attach()
    await stage.engine.accept_attach(attach, [], submit=submit, ended={})
    assert (await ending).status_code == 204
    abort = await stage.engine.read_abort()
    assert (abort.request_id, abort.attachment) == (submit.request_id, attach.attachment)
    assert "[DONE]" not in (await older).text
    assert stage.model.engine.num_open == 0
    assert (await stage.http.delete("/v1/streams/nonsense")).status_code == 404
