"""Parameters of beam searches, and fields that a beam search refuses."""

from typing import Any

import pytest

from shared.messages.requests import Submit
from shared.sampling import BeamParams
from tests.gateway.beam_searches import submitted_search
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.fake_engine import kv_pool


async def test_n_is_the_width_and_other_parameters_are_those_of_transformers(stage: Stage) -> None:
    for post in (stage.complete, stage.chat):
        submit = await submitted_search(stage, post)
        assert submit.sampling.beams == BeamParams(1, 1.0, "false")
        submit = await submitted_search(stage, post, n=4, length_penalty=-0.5, early_stopping=True)
        assert submit.num_choices == 4
        assert submit.sampling.beams == BeamParams(4, -0.5, "true")
        submit = await submitted_search(stage, post, n=2, length_penalty=2, early_stopping="never")
        assert submit.sampling.beams == BeamParams(2, 2.0, "never")


async def test_sampling_parameters_of_a_search_are_neutral(stage: Stage) -> None:
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "stop": [], "best_of": None}
    for body in ({}, neutral, {"seed": 5}):
        sampling = (await submitted_search(stage, stage.complete, **body)).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)
        assert (sampling.min_p, sampling.seed, sampling.num_logprobs) == (0.0, 0, None)
        assert sampling.num_prompt_logprobs is None


async def test_limits_of_a_search_reach_the_engine(stage: Stage) -> None:
    given = {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [7, 8], "ignore_eos": True}
    submit = await submitted_search(
        stage, stage.complete, n=2, priority=-3, cache_salt="s", **given
    )
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (9, 3, True)
    assert sampling.stop_token_ids == (7, 8)
    assert (submit.priority, submit.cache_salt) == (-3, "s")


async def test_without_use_beam_search_there_is_no_search(stage: Stage) -> None:
    stage.answer_text("Hi")
    body = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    choice = (await stage.complete(**body)).json()["choices"][0]
    assert "beam_score" not in choice
    [submit] = stage.engine.received
    assert isinstance(submit, Submit)
    assert submit.sampling.beams is None
    assert submit.sampling.temperature == 1.0


REFUSED: list[tuple[str, Any, str]] = [
    # (field, value, what the message says)
    ("temperature", 1, "does not sample"),
    ("temperature", 0.5, "give 0"),
    ("top_p", 0.9, "does not sample"),
    ("top_k", 1, "does not sample"),
    ("min_p", 0.1, "does not sample"),
    ("stop", "END", "stop_token_ids"),
    ("stop", ["END"], "stop_token_ids"),
    ("n", 65, "at most 64 beams"),
    ("n", 17, "at most 16 choices"),
    ("length_penalty", 1000, "100"),
    ("early_stopping", "soon", "never"),
    ("frequency_penalty", 0.5, "own probabilities"),
    ("presence_penalty", -0.5, "own probabilities"),
    ("repetition_penalty", 1.1, "own probabilities"),
]
COMPLETION_REFUSED: list[tuple[str, Any, str]] = [
    ("logit_bias", {"5": 1.0}, "own probabilities"),
    ("best_of", 4, "n is 2"),
    ("best_of", 1, "n is 2"),
    ("logprobs", 1, "give 0"),
    ("max_tokens", 0, "at least one"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_field_that_a_search_does_not_take_is_named(stage: Stage, stream: bool) -> None:
    cases = [(stage.complete, *case) for case in REFUSED + COMPLETION_REFUSED]
    cases += [(stage.chat, *case) for case in REFUSED]
    for post, field, value, expected in cases:
        body = {"n": 2, "echo": True} if field == "max_tokens" else {"n": 2}
        response = await post(use_beam_search=True, stream=stream, **{**body, field: value})
        assert response.status_code == 400, (field, value)
        error = response.json()["error"]
        assert error["param"] == field
        kind = {list: "list", dict: "map"}.get(type(value))
        shown = repr(value) if kind is None else f"a {kind} of {len(value)}"
        assert f"{field}={shown}" in error["message"]
        assert expected in error["message"]
    assert stage.engine.received == []


async def test_log_probabilities_that_a_search_does_not_have_are_refused(stage: Stage) -> None:
    response = await stage.complete(use_beam_search=True, echo=True, logprobs=0)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "echo"
    response = await stage.chat(use_beam_search=True, logprobs=True, top_logprobs=3)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_logprobs"
    assert "top_logprobs=3" in response.json()["error"]["message"]
    assert stage.engine.received == []


async def test_options_of_a_search_need_use_beam_search(stage: Stage) -> None:
    for field, value in (("length_penalty", 0.5), ("early_stopping", "never")):
        for post in (stage.complete, stage.chat):
            response = await post(**{field: value})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field
            assert "use_beam_search" in response.json()["error"]["message"]


async def test_beams_that_do_not_fit_into_the_pool_are_refused(make_stage: MakeStage) -> None:
    stage = await make_stage(ready=False)
    await stage.engine.publish(kv=kv_pool(8))
    await stage.until(lambda: stage.server.service.why_not_ready() is None)
    body: dict[str, Any] = {"prompt": [5] * 40, "n": 3, "max_tokens": 26}
    response = await stage.complete(use_beam_search=True, **body)
    assert response.status_code == 400
    assert "3 choices need 11 blocks" in response.json()["error"]["message"]
    await submitted_search(stage, stage.complete, **{**body, "max_tokens": 25})
