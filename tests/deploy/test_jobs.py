"""A batch and a response in the background outlive every process, also all of them at once.

Each line of the batch has one answer, and the response one text, those of an undisturbed run.
"""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Batch

from tests.deploy.running import ANSWER_DEADLINE_S, Running

NUM_LINES = 80
LENGTH = 300  # of the response, in tokens
CHATS: Any = "/v1/chat/completions"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    served = Running(
        tmp_path_factory.mktemp("jobs"), "--dtype", "float32", "--batch-concurrency", "4"
    )
    try:
        served.until_ready()
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=10) as made:
        yield made


def line(number: int) -> str:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Tell me story {number}."}],
        "max_tokens": 30,
        "temperature": 1,
        "seed": number,
        "ignore_eos": True,
    }
    asked = {"custom_id": f"line-{number}", "method": "POST", "url": CHATS, "body": body}
    return json.dumps(asked)


def begin_batch(client: OpenAI) -> Batch:
    data = "\n".join(map(line, range(NUM_LINES))).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")


def num_done(client: OpenAI, batch: Batch) -> int:
    found = client.batches.retrieve(batch.id)
    assert found.status in ("validating", "in_progress", "finalizing", "completed"), found
    assert found.request_counts is not None
    return found.request_counts.completed


def lines_of(running: Running, client: OpenAI, batch: Batch) -> dict[str, str]:
    """The text of each line at the end of the batch."""
    running.until(
        lambda: client.batches.retrieve(batch.id).status == "completed",
        2 * ANSWER_DEADLINE_S,
        "the end of the batch",
    )
    ended = client.batches.retrieve(batch.id)
    assert ended.request_counts is not None
    assert ended.request_counts.completed == ended.request_counts.total == NUM_LINES
    assert ended.output_file_id is not None
    rows = [json.loads(row) for row in client.files.content(ended.output_file_id).iter_lines()]
    assert len(rows) == NUM_LINES, "each line has one answer"
    return {
        row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"]
        for row in rows
    }


def respond(client: OpenAI, **more: Any) -> Any:
    return client.responses.create(
        model="demo",
        input="Tell me a story.",
        max_output_tokens=LENGTH,
        temperature=1,
        extra_body={"seed": 11, "ignore_eos": True},
        **more,
    )


def until_tokens(client: OpenAI, response_id: str) -> int:
    """The number of an event in the middle of the text."""
    for event in client.responses.retrieve(response_id, stream=True):
        if event.sequence_number == 20:
            return event.sequence_number
    pytest.fail("the response ended before it could be disturbed")


def rest_of(running: Running, client: OpenAI, response_id: str, after: int) -> str:
    """The text behind an event, up to the end of the response."""

    def ended() -> bool:
        found = client.responses.retrieve(response_id)
        return found.status not in ("queued", "in_progress")

    running.until(ended, ANSWER_DEADLINE_S, "the end of the response")
    return "".join(
        event.delta
        for event in client.responses.retrieve(response_id, stream=True, starting_after=after)
        if event.type == "response.output_text.delta"
    )


@pytest.fixture(scope="module")
def undisturbed(running: Running, client: OpenAI) -> tuple[dict[str, str], str]:
    batch = begin_batch(client)
    text: str = respond(client).output_text
    assert len(text) > LENGTH
    return lines_of(running, client, batch), text


@pytest.mark.parametrize("victims", [("gateway", "worker"), ("scheduler", "redis"), ("all",)])
def test_they_are_finished_whichever_processes_die(
    running: Running,
    client: OpenAI,
    undisturbed: tuple[dict[str, str], str],
    victims: tuple[str, ...],
) -> None:
    batch = begin_batch(client)
    running.until(lambda: num_done(client, batch) >= 10, ANSWER_DEADLINE_S, "10 lines")
    made = respond(client, background=True)
    after = until_tokens(client, made.id)
    assert num_done(client, batch) < NUM_LINES, "it ended before it could be disturbed"
    if victims == ("all",):
        running.stop()
        running.start()
        running.until_ready()
    else:
        for victim in victims:
            os.kill(running.pid(victim), signal.SIGKILL)
    lines, text = undisturbed
    rest = rest_of(running, client, made.id, after)
    assert client.responses.retrieve(made.id).output_text == text
    assert text.endswith(rest)
    assert 0 < len(rest) < len(text)
    assert lines_of(running, client, batch) == lines
