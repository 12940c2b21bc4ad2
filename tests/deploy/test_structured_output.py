"""Structured output by the official client, from real processes, also when a worker dies."""

import os
import signal
from collections.abc import Iterator

import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.deploy.running import Running, forked_by

QUESTION = [{"role": "user", "content": "Who lives there?"}]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    words: list[str] = Field(max_length=2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    served = Running(tmp_path_factory.mktemp("structured"), "--dtype", "float32")
    try:
        served.until_ready()
        yield served
    finally:
        served.close()


@pytest.fixture
def client(running: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_an_answer_is_parsed_into_the_callers_class(client: OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(
            model="demo",
            messages=QUESTION,  # type: ignore[arg-type]
            response_format=Person,
            max_tokens=1_000,
            temperature=1,
            seed=seed,
        )
        [choice] = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)


def test_choices_and_beams_are_among_those_given(client: OpenAI) -> None:
    colors = ["red", "dark green", "blue", "black"]
    for more in ({"temperature": 1.0}, {"temperature": 0.0, "use_beam_search": True}):
        answer = client.completions.create(
            model="demo",
            prompt="The color is",
            n=3,
            max_tokens=20,
            extra_body={"guided_choice": colors, **more},
        )
        assert len(answer.choices) == 3
        for choice in answer.choices:
            assert choice.text in colors
            assert choice.finish_reason == "stop"


def test_a_worker_that_is_killed_changes_no_structured_text(
    running: Running, client: OpenAI
) -> None:
    def stream() -> Iterator[str]:
        chunks = client.completions.create(
            model="demo",
            prompt="Numbers:",
            max_tokens=400,
            temperature=1,
            seed=7,
            stream=True,
            extra_body={"guided_regex": r"([0-9]{2}, ){150}end"},
        )
        for chunk in chunks:
            yield chunk.choices[0].text
        assert chunk.choices[0].finish_reason in ("stop", "length")

    undisturbed = "".join(stream())
    text = ""
    for number, part in enumerate(stream()):
        text += part
        if number == 20:
            worker = forked_by(running.pid("worker"))
            assert worker is not None
            os.kill(worker, signal.SIGKILL)
    assert text == undisturbed


def test_a_schema_that_cannot_be_compiled_ends_no_service(running: Running, client: OpenAI) -> None:
    body = {"model": "demo", "prompt": "x", "guided_json": {"not": {}}}
    status, answer = running.post("/v1/completions", body)
    assert status == 400
    assert answer["error"]["message"].startswith("guided_json: it cannot be compiled: Unimpl")
    assert client.completions.create(model="demo", prompt="x", max_tokens=1).choices
