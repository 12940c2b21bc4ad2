"""Fetches a model of the hub ahead of its loading, and tells how far that is."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from tqdm.std import tqdm

from shared.logs import EventLog

# What transformers reads of a model; weights in other formats and in folders are other copies.
_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "model*.safetensors")
_FOLDERS = "*/*"

log = EventLog(__name__)


class LoggedProgress(tqdm):  # type: ignore[misc]
    """A progress bar of bytes as lines in the log, every few seconds; of anything else none."""

    monitor_interval = 0  # no thread
    news_s = 2.0

    def __init__(self, *args: Any, **options: Any) -> None:
        # Where there is no terminal, tqdm would write lines of its own there.
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 (close() closes it)
        super().__init__(*args, **{**options, "file": self._nowhere, "mininterval": self.news_s})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # noqa: ARG002
        if self.unit == "B" and self.n and self.total:
            percent = round(100 * self.n / self.total)
            log.info("downloading model", percent=percent, bytes=int(self.n), of=int(self.total))
        return True

    def close(self) -> None:
        super().close()
        self._nowhere.close()


def download(model: str) -> None:
    """Have a model's files in the hub's cache; does nothing for a folder, or without the hub.

    What fails here fails again when the model is loaded, where it can be explained.
    """
    if Path(model).is_dir() or constants.HF_HUB_OFFLINE:
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
