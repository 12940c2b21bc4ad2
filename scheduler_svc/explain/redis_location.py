"""Finds the Redis that holds the logs: the one that was named, or the launcher's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from scheduler_svc.settings import SchedulerSettings
from shared.errors import SettingsError
from shared.settings import load
from shared.state_folder import DEFAULT_PORT, redis_url_file, state_folder

_STATE_DIR_VARIABLE = "PAGESTREAM_STATE_DIR"  # as the launcher reads it


@dataclass(frozen=True, slots=True)
class RedisPlace:
    """A Redis, and the setting or file that named it."""

    url: str
    named_by: str

    def __str__(self) -> str:
        """For messages: without user, password and options."""
        parts = urlsplit(self.url)
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        return f"{place}, from {self.named_by}"


def find_redis(
    redis_url: str | None,
    state_dir: str | None,
    environ: Mapping[str, str],
    port: int = DEFAULT_PORT,
) -> RedisPlace:
    """The one that is named, else that of ``scripts/serve``, else the services' default.

    Args:
        redis_url, state_dir: as given on the command line.
        port: of ``scripts/serve``, whose state folder may depend on it.

    Raises:
        SettingsError: the state folder that was given names no Redis.
    """
    if redis_url is not None:
        return RedisPlace(redis_url, "--redis-url")
    if state_dir is None and port == DEFAULT_PORT and environ.get("REDIS_URL"):
        return RedisPlace(environ["REDIS_URL"], "REDIS_URL")
    name = state_dir or environ.get(_STATE_DIR_VARIABLE) or None
    file = redis_url_file(state_folder(name, port))
    left = _read(file)
    if left is not None:
        return RedisPlace(left, str(file))
    if state_dir is not None:
        raise SettingsError("--state-dir", state_dir, f"scripts/serve has left no {file}")
    if port != DEFAULT_PORT:
        raise SettingsError("--port", port, f"scripts/serve has left no {file}")
    default = load(SchedulerSettings, {}, {}).redis_url
    return RedisPlace(default, f"the default, for scripts/serve has left no {file}")


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip() or None
    except FileNotFoundError:
        return None
