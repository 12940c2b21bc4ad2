"""Settings of the launcher itself."""

from dataclasses import dataclass
from pathlib import Path

from shared.settings import setting

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_STATE_DIR = ".pagestream"


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
        if self.state_dir == DEFAULT_STATE_DIR:
            return REPOSITORY / DEFAULT_STATE_DIR
        return Path(self.state_dir).expanduser().absolute()
