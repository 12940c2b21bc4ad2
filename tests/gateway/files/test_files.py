"""Files: kept in pieces, given back byte for byte, bounded for each API key."""

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.files.store import PIECE_BYTES
from shared.bus.api import START
from tests.gateway.batches.batch_calls import two_keys
from tests.gateway.conftest import MakeStage, Stage, check_error


async def post(stage: Stage, data: bytes = b"{}\n", **fields: Any) -> httpx.Response:
    """POST /v1/files as a form."""
    form = {"purpose": "batch"} | fields
    return await stage.http.post("/v1/files", data=form, files={"file": ("a.jsonl", data)})


async def test_a_file_is_given_back_byte_for_byte(stage: Stage) -> None:
    data = secrets.token_bytes(2 * PIECE_BYTES + 77) + b"\r\n--x\r\n"
    made = await stage.openai.files.create(file=("ü.jsonl", data), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (len(data), "ü.jsonl", "batch")
    assert made.expires_at is not None
    assert made.expires_at - made.created_at == 7 * 86_400
    content = await stage.openai.files.content(made.id)
    assert content.content == data
    assert await stage.openai.files.retrieve(made.id) == made
    pieces = await stage.engine.bus.read({stage.engine.keys.file_pieces(made.id): START}, 0, 100)
    sizes = [entry.num_bytes for entry in next(iter(pieces.values()))]
    assert len(sizes) == 3
    assert max(sizes) < PIECE_BYTES + 1_000


async def test_a_body_of_a_file_is_not_held(make_stage: MakeStage) -> None:
    limit = 64 * 2**10
    stage = await make_stage(max_body_bytes=limit, max_total_body_bytes=limit)
    assert (await post(stage, bytes(3 * limit))).status_code == 200
    quotas = stage.server.service.quotas
    assert quotas.body_bytes.held == 0


async def test_a_deleted_file_is_forgotten(stage: Stage) -> None:
    made = (await post(stage)).json()
    url = f"/v1/files/{made['id']}"
    assert (await stage.http.delete(url)).json() == {
        "id": made["id"],
        "object": "file",
        "deleted": True,
    }
    for path in (url, f"{url}/content"):
        check_error(await stage.http.get(path), 404)
    check_error(await stage.http.delete(url), 404)
    assert [file async for file in stage.openai.files.list()] == []


async def test_files_are_listed_in_pages(stage: Stage) -> None:
    made = [(await post(stage, b"%d\n" % number)).json()["id"] for number in range(5)]
    await stage.http.delete(f"/v1/files/{made[2]}")
    left = made[:2] + made[3:]
    assert [file.id async for file in stage.openai.files.list(limit=2)] == left[::-1]
    assert [file.id async for file in stage.openai.files.list(order="asc", limit=3)] == left
    page = (await stage.http.get("/v1/files", params={"limit": 4})).json()
    assert not page["has_more"]
    assert (page["first_id"], page["last_id"]) == (left[-1], left[0])
    none = await stage.http.get("/v1/files", params={"purpose": "batch_output"})
    assert none.json()["data"] == []
    for name, value in (("limit", "0"), ("after", "file-x"), ("order", "up"), ("purpose", "x")):
        check_error(await stage.http.get("/v1/files", params={name: value}), 400, name)


async def test_a_file_can_expire_earlier(stage: Stage) -> None:
    after = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    made = (await post(stage, **after)).json()
    assert made["expires_at"] - made["created_at"] == 3_600
    refused = await post(stage, **(after | {"expires_after[seconds]": "12"}))
    check_error(refused, 400, "expires_after")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": ["batch", "batch"]}, "purpose"),
        ({"purpose": "b" * 1_000}, "purpose"),
        ({"model": "demo"}, "model"),
    ],
)
async def test_a_field_that_a_form_cannot_have_is_named(
    stage: Stage, fields: dict[str, Any], param: str
) -> None:
    check_error(await post(stage, **fields), 400, param)
    assert [file async for file in stage.openai.files.list()] == []


async def test_a_body_that_is_no_form_is_refused(stage: Stage) -> None:
    url, kind = "/v1/files", "multipart/form-data; boundary=b"
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    check_error(await stage.http.post(url, json={"purpose": "batch"}), 400, "Content-Type")
    for body in (head + b"cut off", b"no boundary", b"", b"--b\r\nX: y\r\n\r\nz\r\n--b--"):
        refused = await stage.http.post(url, content=body, headers={"Content-Type": kind})
        check_error(refused, 400)
    whole = head + b"{}\r\n--b--\r\n"
    refused = await stage.http.post(url, content=whole, headers={"Content-Type": kind})
    check_error(refused, 400, "purpose")
    check_error(await stage.http.post(url, data={"purpose": "batch", "file": "x"}), 400)
    refused = await stage.http.post(url, files={"purpose": (None, b"batch"), "file": (None, b"x")})
    check_error(refused, 400, "file")


async def test_a_file_that_is_too_large_is_refused(make_stage: MakeStage) -> None:
    stage = await make_stage(batch_file_bytes=1_000)
    assert (await post(stage, bytes(1_000))).status_code == 200
    check_error(await post(stage, bytes(1_001)), 413, "file")
    check_error(await post(stage, bytes(100_000)), 413, "file")
    assert len([file async for file in stage.openai.files.list()]) == 1


async def test_what_the_files_of_one_key_may_keep_is_bounded(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    _, ann, bob = await two_keys(make_stage, tmp_path, batch_bytes=200_000)
    data = bytes(150_000)
    made = await ann.files.create(file=("a", data), purpose="batch")
    with pytest.raises(openai.RateLimitError, match="200000 bytes"):
        await ann.files.create(file=("a", data), purpose="batch")
    await bob.files.create(file=("a", data), purpose="batch")
    # Deletions of one file at once give its room back once.
    deleted = await asyncio.gather(
        *(ann.files.delete(made.id) for _ in range(4)), return_exceptions=True
    )
    assert any(not isinstance(found, Exception) for found in deleted)
    await ann.files.create(file=("a", data), purpose="batch")
    with pytest.raises(openai.RateLimitError):
        await ann.files.create(file=("a", data), purpose="batch")


async def test_a_file_is_there_for_its_key_alone(make_stage: MakeStage, tmp_path: Path) -> None:
    _, ann, bob = await two_keys(make_stage, tmp_path)
    made = await ann.files.create(file=("a", b"{}"), purpose="batch")
    for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)
    assert [file async for file in bob.files.list()] == []
    with pytest.raises(openai.NotFoundError):
        await bob.batches.create(
            input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
        )
    assert json.loads((await ann.files.content(made.id)).text) == {}
