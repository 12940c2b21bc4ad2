"""The state folder of ``scripts/serve``."""

from pathlib import Path

DEFAULT_STATE_DIR = ".pagestream"


DEFAULT_PORT = 8000


def state_folder(name: str | None, port: int = DEFAULT_PORT) -> Path:
    """Absolute path of a state folder.

    Args:
        name: as given; None: a folder in the repository, one for each port, so that several
            servers can run side by side.
        port: of the server, as given.
    """
    if name is not None:
        return Path(name).expanduser().absolute()
    folder = Path(__file__).resolve().parent.parent / DEFAULT_STATE_DIR
    return folder if port in (DEFAULT_PORT, 0) else folder / f"port-{port}"


def redis_url_file(folder: Path) -> Path:
    """The file with the URL of the Redis that the launcher's services use."""
    return folder / "run" / "redis.url"
