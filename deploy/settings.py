"""Settings of the launcher itself."""

from dataclasses import dataclass
from pathlib import Path

from shared.settings import setting
from shared.state_folder import DEFAULT_STATE_DIR, state_folder

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class LauncherSettings:
    """All services of one machine."""

    state_dir: str = setting(
        DEFAULT_STATE_DIR,
        "Folder for Redis data, logs, process ids and caches; the default lies in the repository.",
    )

    @property
    def state_path(self) -> Path:
        """Absolute path of the state folder."""
        return state_folder(self.state_dir)
