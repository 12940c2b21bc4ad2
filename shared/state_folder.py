"""The folder of ``scripts/serve``, for those who look into what it runs."""

from pathlib import Path

DEFAULT_STATE_DIR = ".pagestream"


def state_folder(name: str) -> Path:
    """Absolute path of a state folder; the default one lies in the repository."""
    if name == DEFAULT_STATE_DIR:
        return Path(__file__).resolve().parent.parent / DEFAULT_STATE_DIR
    return Path(name).expanduser().absolute()


def redis_url_file(folder: Path) -> Path:
    """Where the launcher leaves word of the Redis that its services use."""
    return folder / "run" / "redis.url"
