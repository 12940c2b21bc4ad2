"""Responses that are kept: asked for, continued, deleted, and their number bounded."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.gateway.responses.stages import create, events_of, play, reasoning_stage, second_gateway


async def test_a_response_is_the_same_from_another_gateway(make_stage: MakeStage) -> None:
    stage = await reasoning_stage(make_stage)
    other = await second_gateway(make_stage, stage)
    made = (await create(stage, metadata={"a": "b"})).json()
    assert made["metadata"] == {"a": "b"}
    assert (await other.http.get(f"/v1/responses/{made['id']}")).json() == made


async def test_a_response_continues_those_before_it(make_stage: MakeStage) -> None:
    stage = await make_stage()
    played = play(stage, "Fine.")
    first = (await create(stage, tools=[], input="One.", instructions="Not kept.")).json()
    second = (await create(stage, tools=[], input="Two.", previous_response_id=first["id"])).json()
    played.known.clear()
    third = await create(stage, tools=[], input="Three.", previous_response_id=second["id"])
    assert third.json()["previous_response_id"] == second["id"]
    [submit] = played.known.values()
    prompt = stage.tokenizer.decode(submit.prompt.tolist(), skip_special=False)
    places = [prompt.index(part) for part in ("One.", "Two.", "Three.")]
    assert places == sorted(places)
    assert prompt.count("Fine.") == 2
    assert "Not kept." not in prompt


async def test_input_items_are_listed_in_pages(stage: Stage) -> None:
    play(stage, "ok")
    items = [{"role": "user", "content": f"item {number}"} for number in range(5)]
    made = (await create(stage, tools=[], input=items)).json()
    url = f"/v1/responses/{made['id']}/input_items"
    page = (await stage.http.get(url, params={"order": "asc", "limit": 2})).json()
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["item 0", "item 1"]
    assert page["has_more"]
    rest = await stage.http.get(url, params={"order": "asc", "after": page["last_id"]})
    assert [item["content"][0]["text"] for item in rest.json()["data"]] == [
        "item 2",
        "item 3",
        "item 4",
    ]
    found = [item async for item in stage.openai.responses.input_items.list(made["id"], limit=2)]
    assert len(found) == 5
    check_error(await stage.http.get(url, params={"limit": "0"}), 400, "limit")
    check_error(await stage.http.get(url, params={"order": "up"}), 400, "order")
    check_error(await stage.http.get(url, params={"after": "x"}), 400, "after")


async def test_a_deleted_response_is_forgotten(stage: Stage) -> None:
    play(stage, "ok")
    made = (await create(stage, tools=[])).json()
    url = f"/v1/responses/{made['id']}"
    assert (await stage.http.delete(url)).json()["deleted"]
    for response in (await stage.http.get(url), await stage.http.delete(url)):
        assert check_error(response, 404)["code"] == "response_not_found"
    again = await create(stage, tools=[], previous_response_id=made["id"])
    error = check_error(again, 404, "previous_response_id")
    assert error["code"] == "previous_response_not_found"


@pytest.mark.parametrize("name", ["resp_" + "0" * 32, "x", "resp_..", "%00"])
async def test_there_is_no_other_response(stage: Stage, name: str) -> None:
    for url in (f"/v1/responses/{name}", f"/v1/responses/{name}/input_items"):
        check_error(await stage.http.get(url), 404)
    check_error(await stage.http.post(f"/v1/responses/{name}/cancel"), 404)


async def test_a_response_that_is_not_to_be_kept_is_not(stage: Stage) -> None:
    play(stage, "ok")
    made = (await create(stage, tools=[], store=False)).json()
    assert made["store"] is False
    check_error(await stage.http.get(f"/v1/responses/{made['id']}"), 404)


async def test_another_key_cannot_see_it(make_stage: MakeStage, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [
        f"{name} sha256:{hashlib.sha256(name.encode()).hexdigest()}" for name in ("ann", "bob")
    ]
    keys.write_text("\n".join(lines))
    stage = await make_stage(api_keys=str(keys))
    play(stage, "ok")
    ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    made = (await create(stage, tools=[], headers=ann)).json()
    url = f"/v1/responses/{made['id']}"
    assert (await stage.http.get(url, headers=ann)).json() == made
    check_error(await stage.http.get(url, headers=bob), 404)
    check_error(await stage.http.delete(url, headers=bob), 404)
    check_error(await stage.http.post(f"{url}/cancel", headers=bob), 404)
    taken = await create(stage, tools=[], previous_response_id=made["id"], headers=bob)
    check_error(taken, 404, "previous_response_id")


async def test_what_one_key_may_keep_is_bounded(make_stage: MakeStage) -> None:
    stage = await make_stage(responses_bytes=4_000)
    play(stage, "ok")
    made: list[Any] = []
    while len(made) < 50:
        answer = (await create(stage, tools=[], input="x y " * 50)).json()
        made.append(answer)
        if not answer["store"]:
            break
    assert 2 < len(made) < 10, "a response without room is answered, and not kept"
    refused = await create(stage, tools=[], input="x y " * 50, store=True)
    error = check_error(refused, 429, "store")
    assert "4000 bytes" in error["message"]
    check_error(await create(stage, tools=[], input="x y " * 50, background=True), 429, "store")
    await stage.http.delete(f"/v1/responses/{made[0]['id']}")
    assert (await create(stage, tools=[], input="x", store=True)).json()["store"]


async def test_a_stream_of_a_kept_response_can_be_read_again(make_stage: MakeStage) -> None:
    stage = await reasoning_stage(make_stage)
    made = (await create(stage)).json()
    url = f"/v1/responses/{made['id']}?stream=true"
    events = events_of((await stage.http.get(url)).text)
    assert events[-1]["response"] == made
    for after in range(len(events)):
        rest = await stage.http.get(f"{url}&starting_after={after}")
        found = events_of(rest.text) if rest.text else []
        assert found == events[after + 1 :]
