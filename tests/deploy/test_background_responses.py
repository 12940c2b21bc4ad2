"""A response in the background outlives every process, also all of them at once."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.deploy.running import ANSWER_DEADLINE_S, Running

LENGTH = 300


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    served = Running(tmp_path_factory.mktemp("background"), "--dtype", "float32")
    try:
        served.until_ready()
        yield served
    finally:
        served.close()


@pytest.fixture
def client(running: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=10) as made:
        yield made


def ask(client: OpenAI, **more: Any) -> Any:
    return client.responses.create(
        model="demo",
        input="Tell me a story.",
        max_output_tokens=LENGTH,
        temperature=1,
        extra_body={"seed": 11, "ignore_eos": True},
        **more,
    )


@pytest.fixture(scope="module")
def undisturbed(running: Running) -> str:
    with OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as client:
        text: str = ask(client).output_text
    assert len(text) > LENGTH
    return text


def until_tokens(client: OpenAI, response_id: str) -> int:
    """The number of an event in the middle of the text."""
    for event in client.responses.retrieve(response_id, stream=True):
        if event.sequence_number == 20:
            return event.sequence_number
    pytest.fail("the response ended before it could be disturbed")


def rest_of(running: Running, client: OpenAI, response_id: str, after: int) -> str:
    """The text behind an event, up to the end of the response."""
    texts: list[str] = []

    def ended() -> bool:
        found = client.responses.retrieve(response_id)
        return found.status not in ("queued", "in_progress")

    running.until(ended, ANSWER_DEADLINE_S, "the end of the response")
    for event in client.responses.retrieve(response_id, stream=True, starting_after=after):
        if event.type == "response.output_text.delta":
            texts.append(event.delta)
    return "".join(texts)


@pytest.mark.parametrize("victim", ["gateway", "scheduler", "worker", "redis", "all"])
def test_it_is_finished_whichever_process_dies(
    running: Running, client: OpenAI, undisturbed: str, victim: str
) -> None:
    made = ask(client, background=True)
    after = until_tokens(client, made.id)
    if victim == "all":
        running.stop()
        running.start()
        running.until_ready()
    else:
        os.kill(running.pid(victim), signal.SIGKILL)
    rest = rest_of(running, client, made.id, after)
    found = client.responses.retrieve(made.id)
    assert found.output_text == undisturbed
    assert undisturbed.endswith(rest)
    assert 0 < len(rest) < len(undisturbed)
