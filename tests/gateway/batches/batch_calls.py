"""Files and batches by openai's client, and gateways with two API keys."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types import Batch

from tests.gateway.conftest import MakeStage, Stage

WAITING_S = 30.0
CHATS = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int, url: str = CHATS, **body: Any) -> dict[str, Any]:
    """A line of a file that is valid unless the body is not."""
    messages = [{"role": "user", "content": f"Question {number}"}]
    asked = {"model": "demo", "messages": messages} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": asked}


def jsonl(lines: Sequence[Any]) -> bytes:
    """Lines as a file; texts stand as they are."""
    shown = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    return "\n".join(shown).encode()


async def upload(client: AsyncOpenAI, lines: Sequence[Any]) -> str:
    """The id of a new file."""
    made = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return made.id


async def begin(
    client: AsyncOpenAI, lines: Sequence[Any], url: Any = CHATS, window: Any = "24h"
) -> Batch:
    """A new batch."""
    file_id = await upload(client, lines)
    return await client.batches.create(
        input_file_id=file_id, endpoint=url, completion_window=window
    )


async def until(client: AsyncOpenAI, batch_id: str, *statuses: str) -> Batch:
    """The batch as soon as it has one of these statuses."""
    async with asyncio.timeout(WAITING_S):
        while True:
            found = await client.batches.retrieve(batch_id)
            if found.status in statuses:
                return found
            assert found.status not in ENDED, found
            await asyncio.sleep(0.01)


async def rows_of(client: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by their ids, each of which it has once; none without a file."""
    if file_id is None:
        return {}
    content = await client.files.content(file_id)
    rows = [json.loads(text) for text in content.text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


async def two_keys(
    make_stage: MakeStage, folder: Path, **changes: Any
) -> tuple[Stage, AsyncOpenAI, AsyncOpenAI]:
    """A gateway and the clients of two API keys."""
    keys = folder / "keys"
    names = ("ann", "bob")
    keys.write_text(
        "\n".join(f"{name} sha256:{hashlib.sha256(name.encode()).hexdigest()}" for name in names)
    )
    stage = await make_stage(api_keys=str(keys), **changes)
    ann, bob = (stage.openai.with_options(api_key=name) for name in names)
    return stage, ann, bob
