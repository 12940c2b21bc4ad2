"""A batch outlives every process: each line has one answer, that of an undisturbed run."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Batch

from tests.deploy.running import ANSWER_DEADLINE_S, Running

NUM_LINES = 120
CHATS: Any = "/v1/chat/completions"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    served = Running(
        tmp_path_factory.mktemp("batches"), "--dtype", "float32", "--batch-concurrency", "8"
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


def begin(client: OpenAI) -> Batch:
    data = "\n".join(map(line, range(NUM_LINES))).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")


def num_done(client: OpenAI, batch: Batch) -> int:
    found = client.batches.retrieve(batch.id)
    assert found.status in ("validating", "in_progress", "finalizing", "completed"), found
    assert found.request_counts is not None
    return found.request_counts.completed


def until_done(running: Running, client: OpenAI, batch: Batch, count: int) -> None:
    """Wait until so many lines have their answers."""
    running.until(
        lambda: num_done(client, batch) >= count, ANSWER_DEADLINE_S, f"{count} answers of the batch"
    )


def texts_of(running: Running, client: OpenAI, batch: Batch) -> dict[str, str]:
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


@pytest.fixture(scope="module")
def undisturbed(running: Running, client: OpenAI) -> dict[str, str]:
    texts = texts_of(running, client, begin(client))
    assert len(texts) == NUM_LINES
    return texts


@pytest.mark.parametrize("victims", [("gateway", "worker"), ("scheduler", "redis"), ("all",)])
def test_every_line_is_answered_once_whichever_processes_die(
    running: Running, client: OpenAI, undisturbed: dict[str, str], victims: tuple[str, ...]
) -> None:
    batch = begin(client)
    until_done(running, client, batch, 20)
    assert num_done(client, batch) < NUM_LINES, "it ended before it could be disturbed"
    if victims == ("all",):
        running.stop()
        running.start()
        running.until_ready()
    else:
        for victim in victims:
            os.kill(running.pid(victim), signal.SIGKILL)
    assert texts_of(running, client, batch) == undisturbed
