"""The folder of ``scripts/serve``, for those who look into what it runs."""

from pathlib import Path

DEFAULT_STATE_DIR = ".pagestream"


DEFAULT_PORT = 8000


def state_folder(name: str | None, port: int = DEFAULT_PORT) -> Path:
    """Absolute path of a state folder.

    Args:
        name: as given; None: a folder in the repository, one for each port, so that several
            servers can run beside each other.
        port: of the server, as given.
    """
    if name is not None:
        return Path(name).expanduser().absolute()
    folder = Path(__file__).resolve().parent.parent / DEFAULT_STATE_DIR
    return folder if port in (DEFAULT_PORT, 0) else folder / f"port-{port}"


def redis_url_file(folder: Path) -> Path:
    """Where the launcher leaves word of the Redis that its services use."""
    return folder / "run" / "redis.url"
