"""Requests without sampling parameters use those of the model's generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from gateway.openai.requests.model_defaults import read_model_defaults
from shared.errors import SettingsError
from tests.gateway.conftest import MakeStage, Stage
from tests.support.real_model import real_model_or_skip

GIVEN = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}


def test_values_are_those_that_transformers_writes_and_reads(tmp_path: Path) -> None:
    GenerationConfig(do_sample=True, eos_token_id=2, **GIVEN).save_pretrained(tmp_path)
    found = read_model_defaults(str(tmp_path))
    assert found == GIVEN
    read = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(read, name) for name in found} == found


def test_a_real_model_is_read() -> None:
    folder = real_model_or_skip()
    config = json.loads((Path(folder) / "generation_config.json").read_text())
    assert read_model_defaults(folder) == {n: v for n, v in config.items() if n in GIVEN}


def test_a_model_without_the_file_has_none(tmp_path: Path) -> None:
    assert read_model_defaults(str(tmp_path)) == {}


def test_greedy_models_are_greedy(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert read_model_defaults(str(tmp_path)) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON is expected"),
        ("[" * 100_000, "JSON is expected"),
        ("\xff", "JSON is expected"),
        ("[1]", "a JSON object is expected"),
        ('{"temperature": "hot"}', "temperature='hot'"),
        ('{"temperature": -1}', "temperature=-1"),
        ('{"top_p": NaN}', "top_p=nan"),
        ('{"top_k": 1.5}', "top_k=1.5"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError) as refused:
        read_model_defaults(str(tmp_path))
    assert "generation_config.json" in str(refused.value)
    assert said in str(refused.value)


async def sampled(stage: Stage, **body: Any) -> dict[str, Any]:
    """The parameters with which the engine is asked."""
    asked = stage.spawn(stage.chat(max_tokens=1, **body))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, [5])
    assert (await asked).status_code == 200
    return {name: getattr(submit.sampling, name) for name in GIVEN}


async def test_requests_use_them_unless_they_give_their_own(make_stage: MakeStage) -> None:
    stage = await make_stage(defaults=GIVEN)
    assert await sampled(stage) == GIVEN
    assert await sampled(stage, temperature=None) == GIVEN
    assert await sampled(stage, temperature=0, top_k=-1) == GIVEN | {
        "temperature": 0.0,
        "top_k": (await sampled(await make_stage()))["top_k"],
    }
    cards = (await stage.http.get("/v1/models")).json()["data"]
    assert cards[0]["default_sampling_params"] == GIVEN
    card = (await stage.http.get(f"/v1/models/{cards[0]['id']}")).json()
    assert card["default_sampling_params"] == GIVEN
    schemas = (await stage.http.get("/openapi.json")).json()["components"]["schemas"]
    for body in ("ChatBody", "CompletionBody"):
        shown = schemas[body]["properties"]
        assert {name: shown[name]["default"] for name in GIVEN} == GIVEN
