"""Settings of the launcher itself."""

from dataclasses import dataclass
from pathlib import Path

from shared.settings import byte_size, setting
from shared.state_folder import DEFAULT_STATE_DIR, state_folder

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class LauncherSettings:
    """Settings for running all services on one machine."""

    state_dir: str | None = setting(
        None,
        f"Folder for Redis data, logs and process ids; auto takes {DEFAULT_STATE_DIR} in the "
        f"repository, or {DEFAULT_STATE_DIR}/port-N for another --port than the default.",
    )

    max_log_bytes: int = setting(
        64 * 2**20,
        "Size at which a service's log file is replaced by a new one; three older files are kept.",
        parse=byte_size,
        minimum=1024,
    )
    redis_port: int = setting(
        0,
        "Port on loopback of the Redis that scripts/serve starts, with the password that is in "
        "run/redis.url of the state folder. 0: only a socket, which other users cannot open.",
        minimum=0,
        maximum=65535,
    )

    def state_path(self, port: int) -> Path:
        """Absolute path of the state folder for a server with this ``--port``."""
        return state_folder(self.state_dir, port)
