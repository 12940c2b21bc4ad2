"""Streams that are continued after any of their events, by the same gateway or by another one."""

from typing import Any

import pytest

from gateway.resume.event_ids import Position
from gateway.resume.stream_ids import call_id_of, secret_of_key, stream_id_of
from shared.messages.requests import Attach
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.resume.played_streams import (
    TEXT,
    Played,
    choices_in,
    parsed,
    post,
    resumable,
    shown,
    two_gateways,
)

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


@pytest.mark.parametrize("n", [1, 2])
async def test_a_forgotten_prompt_is_no_error_for_a_client_that_has_all_of_it(
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
    assert len(stage.engine.received) == 3


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
    other_key = {"Authorization": "Bearer other"}
    foreign = await stage.http.get(url, headers=other_key)
    nonsense = await stage.http.get("/v1/streams/nonsense", headers=other_key)
    never = await stage.http.get(f"/v1/streams/{'0' * 48}", headers=other_key)
    assert foreign.status_code == nonsense.status_code == never.status_code == 404
    assert foreign.content == nonsense.content == never.content
    assert (await stage.http.get(url)).status_code == 200
    asked = {message.request_id for message in stage.engine.received if isinstance(message, Attach)}
    assert asked == set(played.known), "only this stream's requests were looked up"


async def test_another_caller_that_forges_a_stream_id_asks_for_another_stream(
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
    attach = stage.engine.received[-1]
    assert isinstance(attach, Attach)
    assert attach.request_id != request_id
