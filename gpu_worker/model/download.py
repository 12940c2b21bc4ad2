"""Downloads a model from the hub before it is loaded, and logs the progress."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from tqdm.std import tqdm

from shared.logs import EventLog

# Files that transformers reads; other formats and folders hold further copies of the weights.
_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "model*.safetensors")
_FOLDERS = "*/*"

log = EventLog(__name__)


class LoggedProgress(tqdm):  # type: ignore[misc]
    """A progress bar that logs a line every few seconds if it counts bytes, else nothing."""

    monitor_interval = 0  # no thread
    interval_s = 2.0

    def __init__(self, *args: Any, **options: Any) -> None:
        # Without a terminal tqdm would write lines of its own.
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 (close() closes it)
        super().__init__(
            *args, **{**options, "file": self._nowhere, "mininterval": self.interval_s}
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # noqa: ARG002
        if self.unit == "B" and self.n and self.total:
            percent = round(100 * self.n / self.total)
            log.info("downloading model", percent=percent, bytes=int(self.n), of=int(self.total))
        return True

    def close(self) -> None:
        super().close()
        self._nowhere.close()


def download(model: str) -> None:
    """Download a model's files into the hub's cache; does nothing for local files, or offline.

    Failures are only logged: loading the model fails in the same way, and reports the reason.
    """
    if Path(model).exists() or constants.HF_HUB_OFFLINE:
        return
    try:
        snapshot_download(
            model,
            allow_patterns=list(_PATTERNS),
            ignore_patterns=[_FOLDERS],
            tqdm_class=LoggedProgress,
        )
    except Exception as error:
        log.warning("model was not downloaded ahead", model=model, error=error)
