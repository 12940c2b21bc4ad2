"""Penalties and biases on their way to the engine."""

import json
from typing import Any

import pytest

from gateway.openai.requests.beam_parameters import beam_params
from gateway.openai.requests.schema import CompletionBody, parse_body
from shared.messages.requests import Submit
from shared.sampling import PARAMETERS, SamplingParams, TokenBias
from tests.gateway.conftest import Stage

GIVEN: dict[str, Any] = {
    "presence_penalty": -2,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100, "4095": 2.5, "7": 0},
}


def received_sampling(stage: Stage) -> list[SamplingParams]:
    """Sampling parameters that reached the engine."""
    return [message.sampling for message in stage.engine.received if isinstance(message, Submit)]


async def test_they_reach_the_engine(stage: Stage) -> None:
    stage.answer_text("Hi")
    for post in (stage.complete, stage.chat):
        assert (await post(**GIVEN)).status_code == 200
    for sampling in received_sampling(stage):
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 1.5)
        assert sampling.repetition_penalty == 1.1
        assert sampling.logit_bias == (TokenBias(5, -100.0), TokenBias(4095, 2.5))


async def test_they_reach_it_from_the_official_client(stage: Stage) -> None:
    stage.answer_text("Hi")
    await stage.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"50": 3},
        extra_body={"repetition_penalty": 0.9},
    )
    (sampling,) = received_sampling(stage)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 0.9
    assert sampling.logit_bias == (TokenBias(50, 3.0),)


@pytest.mark.parametrize(
    "neutral",
    [
        {},
        dict.fromkeys(GIVEN),
        {"presence_penalty": 0, "frequency_penalty": -0.0, "repetition_penalty": 1},
        {"logit_bias": {}},
        {"logit_bias": {"5": 0.0}},
    ],
    ids=str,
)
async def test_what_changes_nothing_costs_the_engine_nothing(
    stage: Stage, neutral: dict[str, Any]
) -> None:
    stage.answer_text("Hi")
    assert (await stage.complete(**neutral)).status_code == 200
    searching = {"model": "demo", "prompt": "Hello", "use_beam_search": True, **neutral}
    assert beam_params(parse_body(CompletionBody, json.dumps(searching).encode())) is not None
    assert not any(sampling.changes_logits for sampling in received_sampling(stage))


async def test_the_bounds_are_part_of_what_is_allowed(stage: Stage) -> None:
    stage.answer_text("Hi")
    for field, bounds in (
        ("presence_penalty", (-2, 2)),
        ("frequency_penalty", (-2.0, 2.0)),
        ("repetition_penalty", (0.01, 100)),
    ):
        for bound in bounds:
            assert (await stage.complete(**{field: bound})).status_code == 200
    num_most = PARAMETERS["logit_bias"].max_entries
    assert num_most is not None
    most = {str(token): (-1) ** token * 100 for token in range(num_most)}
    assert (await stage.complete(logit_bias=most)).status_code == 200
    assert len(received_sampling(stage)[-1].logit_bias) == num_most


@pytest.mark.parametrize(
    ("biases", "param", "expected"),
    [
        ({"5": 1, "4096": 1.5}, "logit_bias.4096", "logit_bias.4096=1.5: the vocabulary has the"),
        ({"a b": 1}, "logit_bias.a b", "'a b'"),
        ({"5": 101}, "logit_bias.5", "logit_bias.5=101"),
        ({str(token): 1 for token in range(301)}, "logit_bias", "a map of 301: at most 300"),
        ({"x" * 10_000: 1}, "logit_bias." + "x" * 80, "'xxx"),
    ],
)
async def test_what_is_wrong_with_biases_is_named(
    stage: Stage, biases: dict[str, Any], param: str, expected: str
) -> None:
    response = await stage.complete(logit_bias=biases)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert expected in error["message"]
    assert len(error["message"]) < 400
    assert stage.engine.received == []


async def test_an_idempotency_key_stands_for_the_same_penalties(stage: Stage) -> None:
    async def post(**body: Any) -> int:
        asked = {"model": "demo", "prompt": "Hello", **body}
        headers = {"Idempotency-Key": "k"}
        response = await stage.http.post("/v1/completions", json=asked, headers=headers)
        return response.status_code

    engine = stage.engine
    first = stage.spawn(post(logit_bias={"5": 1, "6": 2}, repetition_penalty=2))
    submit = await engine.accept_attach(await engine.read_attach(), [], ended={})
    assert await post(logit_bias={"5": 1, "6": 2.5}, repetition_penalty=2) == 422
    assert await post(logit_bias={"5": 1, "6": 2}) == 422
    same = stage.spawn(post(logit_bias={"6": 2.0, "5": 1.0}, repetition_penalty=2.0))
    attach = await engine.read_attach()
    while attach.submit is None or attach.submit.request_id != submit.request_id:
        attach = await engine.read_attach()
    assert await first == 409
    submit = await engine.accept_attach(attach, [], ended={})
    await engine.generate(submit, [50])
    assert await same == 200
