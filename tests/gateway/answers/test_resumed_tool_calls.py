"""Streams with calls of tools, continued after any of their events by another gateway."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.gateway.answers.tool_models import ADD, call_text, demo_tokenizer
from tests.gateway.conftest import MakeStage
from tests.gateway.resume.played_streams import Played, parsed, two_gateways

TEXTS = (
    "<think>Sum é 😀.</think>\nSo:\n" + call_text('{"a": "é 😀", "b": 2}') + call_text("{}"),
    "No tools. " + call_text('{"a": ') + " <tool",
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


def shown(datas: Sequence[str]) -> dict[int, Any]:
    """What a client puts together of each choice."""
    found: dict[int, Any] = {}
    for data in datas:
        for choice in [] if data == "[DONE]" else json.loads(data)["choices"]:
            parts = found.setdefault(choice["index"], {"calls": {}, "roles": 0, "ends": []})
            delta = choice["delta"]
            for key in ("content", "reasoning_content", "reasoning"):
                parts[key] = parts.get(key, "") + delta.get(key, "")
            parts["roles"] += "role" in delta
            parts["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in delta.get("tool_calls", []):
                known = parts["calls"].setdefault(call["index"], {"heads": [], "arguments": ""})
                known["arguments"] += call["function"]["arguments"]
                if "id" in call:
                    known["heads"].append((call["id"], call["function"]["name"]))
    return found


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_stream_cut_after_any_event_goes_on_in_the_middle_of_an_argument(
    make_stage: MakeStage, parallel: bool
) -> None:
    stage, other = await two_gateways(make_stage)
    tokens = [stage.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    stage.spawn(Played(stage.engine, *tokens).serve())
    response = await stage.chat(
        tools=[ADD],
        n=2,
        stream=True,
        stream_resume=True,
        max_tokens=100,
        parallel_tool_calls=parallel,
    )
    url, found = response.headers["x-stream-url"], parsed(response.text)
    whole = shown([data for _, data in found])
    assert whole[0]["reasoning_content"] == "Sum é 😀."
    assert whole[0]["calls"][0]["arguments"] == '{"a": "é 😀", "b": 2}'
    assert list(whole[0]["calls"]) == ([0, 1] if parallel else [0])
    assert all(
        len(call["heads"]) == 1 for each in whole.values() for call in each["calls"].values()
    )
    for cut in range(len(found) - 1):
        last, before = found[cut][0], [data for _, data in found[: cut + 1]]
        gateway = (stage, other)[cut % 2]
        rest = await gateway.http.get(url, headers={"Last-Event-ID": last})
        assert rest.status_code == 200, rest.text
        more = [data for _, data in parsed(rest.text)]
        assert more[-1] == "[DONE]"
        assert shown(before + more) == whole, (cut, last)
