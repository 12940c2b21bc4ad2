"""Batches: every line has one answer or one error, whatever the file holds."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from shared.messages.endings import EndFlag
from shared.messages.requests import Abort, Attach
from tests.gateway.batches.batch_calls import (
    CHATS,
    ENDED,
    begin,
    line,
    rows_of,
    two_keys,
    until,
    upload,
)
from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.gateway.responses.stages import play, second_gateway

LOWEST = 2**31 - 1


async def test_every_line_has_its_answer(stage: Stage) -> None:
    play(stage, "Fine.")
    client = stage.openai
    made = await begin(client, [line(number) for number in range(40)])
    assert made.status == "validating"
    ended = await until(client, made.id, "completed")
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert ended.error_file_id is None
    rows = await rows_of(client, ended.output_file_id)
    assert rows.keys() == {f"line-{number}" for number in range(40)}
    for row in rows.values():
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["message"]["content"] == "Fine."
        assert row["error"] is None
    assert ended.usage is not None
    used = [row["response"]["body"]["usage"]["total_tokens"] for row in rows.values()]
    assert ended.usage.total_tokens == sum(used)
    times = (ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at)
    assert list(times) == sorted(times, key=lambda when: when or 0)
    files = {file.id: file.purpose async for file in client.files.list()}
    assert files == {ended.input_file_id: "batch", ended.output_file_id: "batch_output"}


async def test_completions_with_several_prompts_are_answered(stage: Stage) -> None:
    play(stage, "Fine.")
    url = "/v1/completions"
    asked = {"custom_id": "a", "method": "POST", "url": url}
    asked["body"] = {"model": "demo", "prompt": ["One", "Two"], "stop": ["."]}  # type: ignore[assignment]
    made = await begin(stage.openai, ["", asked, "  ", ""], url)
    ended = await until(stage.openai, made.id, "completed")
    rows = await rows_of(stage.openai, ended.output_file_id)
    texts = [choice["text"] for choice in rows["a"]["response"]["body"]["choices"]]
    assert texts == ["Fine", "Fine"]


async def test_responses_are_answered_and_continue_kept_ones(stage: Stage) -> None:
    play(stage, "Fine.")
    kept = await stage.openai.responses.create(model="demo", input="Hello")
    url = "/v1/responses"
    bodies: list[dict[str, Any]] = [
        {"input": "Hello"},
        {"input": "And?", "previous_response_id": kept.id},
        {"input": "Hello", "store": True},
        {"input": "Hello", "background": True},
        {"input": "Hello", "text": {"format": {"type": "json_schema", "schema": 1}}},
        {"input": "And?", "previous_response_id": "resp_" + "0" * 32},
    ]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": url, "body": {"model": "demo"} | body}
        for n, body in enumerate(bodies)
    ]
    made = await begin(stage.openai, lines, url)
    ended = await until(stage.openai, made.id, "completed")
    answers = await rows_of(stage.openai, ended.output_file_id)
    assert answers.keys() == {"0", "1"}
    for row in answers.values():
        [item] = row["response"]["body"]["output"]
        assert item["content"][0]["text"] == "Fine."
        assert row["response"]["body"]["status"] == "completed"
        assert not row["response"]["body"]["store"]
    assert answers["1"]["response"]["body"]["previous_response_id"] == kept.id
    errors = await rows_of(stage.openai, ended.error_file_id)
    params = {name: row["response"]["body"]["error"]["param"] for name, row in errors.items()}
    assert params == {
        "2": "store",
        "3": "background",
        "4": "text.format.schema",
        "5": "previous_response_id",
    }
    metrics = stage.server.service.metrics
    async with asyncio.timeout(10):
        while not metrics.batches_ended["completed"]._value.get():
            await asyncio.sleep(0.01)  # polling interval of the condition
    lines_done = {result: one._value.get() for result, one in metrics.batch_lines.items()}
    assert lines_done == {"completed": len(answers), "failed": len(errors)}
    assert all(one._value.get() == 0 for one in metrics.batches.values())


async def test_a_line_whose_body_is_refused_is_in_the_file_of_errors(stage: Stage) -> None:
    play(stage, "Fine.")
    lines = [
        line(0),
        line(1, temperature=9),
        line(2, model="other"),
        line(3, stream=True),
        line(4, priority=0),
        line(5, nonsense=1),
        line(6),
    ]
    made = await begin(stage.openai, lines)
    ended = await until(stage.openai, made.id, "completed")
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 7, "completed": 2, "failed": 5}
    assert (await rows_of(stage.openai, ended.output_file_id)).keys() == {"line-0", "line-6"}
    errors = await rows_of(stage.openai, ended.error_file_id)
    found = {
        name: (row["response"]["status_code"], row["response"]["body"]["error"]["param"])
        for name, row in errors.items()
    }
    assert found == {
        "line-1": (400, "temperature"),
        "line-2": (404, "model"),
        "line-3": (400, "stream"),
        "line-4": (400, "priority"),
        "line-5": (400, "nonsense"),
    }


BAD_LINES: list[tuple[Any, str, str | None]] = [
    ("{", "invalid_json", None),
    ("[1]", "invalid_line", None),
    ({"method": "POST", "url": CHATS, "body": {}}, "missing_field", "custom_id"),
    (line(7) | {"custom_id": 7}, "invalid_value", "custom_id"),
    (line(0), "duplicate_custom_id", "custom_id"),
    (line(7) | {"method": "GET"}, "invalid_value", "method"),
    (line(7, url="/v1/completions"), "mismatched_endpoint", "url"),
    (line(7) | {"body": "text"}, "invalid_value", "body"),
    ('{"custom_id": "x", "body": {"n": ' + "5" * 5_000 + "}}", "invalid_json", None),
    (line(7) | {"priority": 1}, "unsupported_parameter", "priority"),
    (line(7, user="x" * 20_000), "line_too_long", None),
]


async def test_a_bad_file_fails_with_the_line(make_stage: MakeStage) -> None:
    stage = await make_stage(max_body_bytes=10_000)
    for bad, code, param in BAD_LINES:
        made = await begin(stage.openai, [line(0), "", bad, line(8)])
        failed = await until(stage.openai, made.id, "failed")
        assert failed.errors is not None
        [error] = failed.errors.data or []
        assert (error.code, error.line, error.param) == (code, 3, param)
        assert error.message
        assert param is None or param in error.message
        assert (failed.output_file_id, failed.error_file_id) == (None, None)
        assert failed.failed_at is not None


async def test_a_file_without_lines_or_with_too_many_fails(make_stage: MakeStage) -> None:
    stage = await make_stage(batch_lines=3)
    for lines, code in ((["", " "], "empty_file"), ([line(n) for n in range(4)], "too_many_lines")):
        failed = await until(stage.openai, (await begin(stage.openai, lines)).id, "failed")
        assert failed.errors is not None
        assert [error.code for error in failed.errors.data or []] == [code]


async def test_few_lines_are_asked_at_once_behind_all_other_requests(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(batch_concurrency=3)
    tokens = stage.tokenizer.encode("ok", add_special_tokens=False)
    made = await begin(stage.openai, [line(number) for number in range(9)])
    for _ in range(3):
        asked = [await stage.engine.read_attach() for _ in range(3)]
        assert {attach.submit.priority for attach in asked if attach.submit} == {LOWEST}
        assert not stage.engine.pending
        assert stage.model.engine.num_open == 3
        for attach in asked:
            submit = await stage.engine.accept_attach(attach, [])
            await stage.engine.generate(submit, tokens, EndFlag.STOP)
    ended = await until(stage.openai, made.id, "completed")
    assert len(await rows_of(stage.openai, ended.output_file_id)) == 9


async def test_a_line_is_asked_again_while_the_engine_is_full(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("ok", add_special_tokens=False)
    made = await begin(stage.openai, [line(0)])
    first = await stage.engine.read_attach()
    assert first.submit is not None
    await stage.engine.end(first.submit, "overloaded", "the queue is full")
    second = await stage.engine.read_attach()
    assert second.request_id == first.request_id
    submit = await stage.engine.accept_attach(second, [])
    await stage.engine.generate(submit, tokens, EndFlag.STOP)
    ended = await until(stage.openai, made.id, "completed")
    assert ended.request_counts is not None
    assert ended.request_counts.completed == 1


async def test_a_cancelled_batch_keeps_what_was_answered(make_stage: MakeStage) -> None:
    stage = await make_stage(batch_concurrency=2)
    tokens = stage.tokenizer.encode("ok", add_special_tokens=False)
    made = await begin(stage.openai, [line(number) for number in range(5)])
    first, second = [await stage.engine.read_attach() for _ in range(2)]
    submit = await stage.engine.accept_attach(first, [])
    await stage.engine.accept_attach(second, [])
    await stage.engine.generate(submit, tokens, EndFlag.STOP)
    third = await stage.engine.read_attach()
    await stage.until(lambda: stage.model.engine.num_open == 2)

    async def completed() -> int:
        found = await stage.openai.batches.retrieve(made.id)
        assert found.request_counts is not None
        return found.request_counts.completed

    while not await completed():
        pass
    cancelling = await stage.openai.batches.cancel(made.id)
    assert cancelling.status in ("cancelling", "finalizing", "cancelled")
    aborted = {(await stage.engine.read_abort()).request_id for _ in range(2)}
    assert aborted == {second.request_id, third.request_id}
    ended = await until(stage.openai, made.id, "cancelled")
    assert (await rows_of(stage.openai, ended.output_file_id)).keys() == {"line-0"}
    errors = await rows_of(stage.openai, ended.error_file_id)
    assert errors.keys() == {f"line-{number}" for number in range(1, 5)}
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 5, "completed": 1, "failed": 4}
    assert (await stage.openai.batches.cancel(made.id)).status == "cancelled"


async def test_a_batch_expires_with_what_was_answered(make_stage: MakeStage) -> None:
    stage = await make_stage(batch_concurrency=1)
    tokens = stage.tokenizer.encode("ok", add_special_tokens=False)
    made = await begin(stage.openai, [line(number) for number in range(3)], window="2s")
    submit = await stage.engine.accept_attach(await stage.engine.read_attach(), [])
    await stage.engine.generate(submit, tokens, EndFlag.STOP)
    ended = await until(stage.openai, made.id, "expired")
    assert (await rows_of(stage.openai, ended.output_file_id)).keys() == {"line-0"}
    errors = await rows_of(stage.openai, ended.error_file_id)
    assert {row["error"]["code"] for row in errors.values()} == {"batch_expired"}
    assert ended.expired_at is not None
    with pytest.raises(openai.BadRequestError, match="expired already"):
        await stage.openai.batches.cancel(made.id)


async def test_another_gateway_goes_on(make_stage: MakeStage) -> None:
    stage = await make_stage(batch_concurrency=2)
    other = await second_gateway(make_stage, stage, batch_concurrency=2)
    tokens = stage.tokenizer.encode("one two", add_special_tokens=False)
    made = await begin(stage.openai, [line(number) for number in range(4)])
    first, second = [await stage.engine.read_attach() for _ in range(2)]
    submit = await stage.engine.accept_attach(first, [])
    going_on = await stage.engine.accept_attach(second, [])
    await stage.engine.generate(submit, tokens, EndFlag.STOP)
    await stage.engine.read_attach()  # the third line
    found = await stage.openai.batches.retrieve(made.id)
    while not (found.request_counts and found.request_counts.completed):
        found = await stage.openai.batches.retrieve(made.id)
    stage.server.stop()
    await stage.running
    asked: dict[str, Attach] = {}
    while len(asked) < 2:
        message = await stage.engine.read()
        assert not isinstance(message, Abort), "a gateway that leaves must not end it"
        if isinstance(message, Attach) and message.gateway != first.gateway:
            asked[message.request_id] = message
    assert first.request_id not in asked, "a line that has its answer is not asked again"
    again = await stage.engine.accept_attach(asked[second.request_id], [], submit=going_on)
    await stage.engine.generate(again, tokens, EndFlag.STOP)
    for request_id, attach in asked.items():
        if request_id != second.request_id:
            accepted = await stage.engine.accept_attach(attach, [])
            await stage.engine.generate(accepted, tokens, EndFlag.STOP)
    play(stage, "one two")
    ended = await until(other.openai, made.id, "completed")
    rows = await rows_of(other.openai, ended.output_file_id)
    assert len(rows) == 4
    texts = {row["response"]["body"]["choices"][0]["message"]["content"] for row in rows.values()}
    assert texts == {"one two"}


async def test_lines_without_room_for_answers_are_not_answered(make_stage: MakeStage) -> None:
    stage = await make_stage(batch_bytes=12_000, batch_concurrency=1)
    play(stage, "Fine. " * 50)
    made = await begin(stage.openai, [line(number) for number in range(30)])
    ended = await until(stage.openai, made.id, "completed")
    answered = await rows_of(stage.openai, ended.output_file_id)
    errors = await rows_of(stage.openai, ended.error_file_id)
    assert len(answered) + len(errors) == 30
    assert answered
    assert {row["error"]["code"] for row in errors.values()} == {"files_full"}


async def test_a_file_that_a_batch_reads_cannot_be_deleted(make_stage: MakeStage) -> None:
    stage = await make_stage()
    made = await begin(stage.openai, [line(0)])
    check_error(await stage.http.delete(f"/v1/files/{made.input_file_id}"), 400, "file_id")
    await stage.openai.batches.cancel(made.id)
    await until(stage.openai, made.id, "cancelled")
    assert (await stage.openai.files.delete(made.input_file_id)).deleted


async def test_unfinished_batches_of_one_key_are_bounded(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    _, ann, bob = await two_keys(make_stage, tmp_path, batches_queued=2)
    made = [await begin(ann, [line(0)]) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="2 batches"):
        await begin(ann, [line(0)])
    assert (await begin(bob, [line(0)])).status == "validating"
    for call in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(made[0].id)
    assert [batch.id async for batch in ann.batches.list(limit=1)] == [
        batch.id for batch in made[::-1]
    ]


BAD_CALLS: list[tuple[dict[str, Any], int, str]] = [
    ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
    ({"input_file_id": "../x"}, 404, "input_file_id"),
    ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
    ({"completion_window": "soon"}, 400, "completion_window"),
    ({"completion_window": "8d"}, 400, "completion_window"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires"),
    ({"priority": 1}, 400, "priority"),
]


async def test_a_bad_call_names_the_field(stage: Stage) -> None:
    body = {"endpoint": CHATS, "completion_window": "24h"}
    body["input_file_id"] = await upload(stage.openai, [line(0)])
    for changes, status, param in BAD_CALLS:
        refused = await stage.http.post("/v1/batches", json=body | changes)
        error = check_error(refused, status)
        assert str(error["param"]).startswith(param)
    assert [batch async for batch in stage.openai.batches.list()] == []


async def test_metadata_and_an_unknown_batch(stage: Stage) -> None:
    file_id = await upload(stage.openai, [line(0)])
    made = await stage.openai.batches.create(
        input_file_id=file_id, endpoint=CHATS, completion_window="24h", metadata={"a": "b"}
    )
    assert made.metadata == {"a": "b"}
    assert made.status not in ENDED
    for path in ("batch_x", "batch_" + "0" * 32):
        check_error(await stage.http.get(f"/v1/batches/{path}"), 404)
