"""The Redis whose logs are read."""

from pathlib import Path

import pytest

from scheduler_svc.explain.redis_location import find_redis
from shared.errors import SettingsError
from shared.state_folder import redis_url_file


@pytest.fixture
def state_dir(tmp_path: Path) -> str:
    """A folder of ``scripts/serve``, whose Redis has a password."""
    file = redis_url_file(tmp_path)
    file.parent.mkdir()
    file.write_text("redis://user:hidden@left:1/0?password=hidden\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("flag", "named", "wins"),
    [
        ("redis://flag:1/0", "redis://variable:1/0", "redis://flag:1/0, from --redis-url"),
        (None, "redis://variable:1/0", "redis://variable:1/0, from REDIS_URL"),
        (None, "", "redis://left:1/0, from {file}"),
    ],
)
def test_the_redis_that_is_named_is_read_else_that_of_the_launcher(
    state_dir: str, flag: str | None, named: str, wins: str
) -> None:
    environ = {"REDIS_URL": named, "PAGESTREAM_STATE_DIR": state_dir}
    found = find_redis(flag, None, environ)
    assert str(found) == wins.format(file=redis_url_file(Path(state_dir)))


def test_a_state_folder_that_is_named_counts_more_than_the_variable(state_dir: str) -> None:
    environ = {"REDIS_URL": "redis://variable:1/0"}
    found = find_redis(None, state_dir, environ)
    assert found.url == "redis://user:hidden@left:1/0?password=hidden"


def test_without_a_redis_url_the_default_is_read_and_that_is_logged(tmp_path: Path) -> None:
    found = find_redis(None, None, {"PAGESTREAM_STATE_DIR": str(tmp_path)})
    assert str(found).startswith("redis://127.0.0.1:6379/0, from the default, for scripts/serve")
    with pytest.raises(SettingsError, match=r"redis\.url"):
        find_redis(None, str(tmp_path), {})
