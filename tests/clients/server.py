"""The server that clients call: one that runs already, or one that is started for them.

Neither the demo model nor SmolLM2 has a chat template for tools, so a server of our own gets one.
"""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.client import HERE, NEEDS
from tests.deploy.running import Running, ready_lines

_READY_DEADLINE_S = 600.0  # the first start makes the model and compiles kernels
_LOOK_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server as clients see it.

    Attributes:
        url: without ``/v1``.
        model: its name in the API.
        tokenizer: folder of the model, if it is on this machine.
        missing: paths that it lacks, by the beginning of the names of calls that need them.
    """

    url: str
    model: str
    tokenizer: str | None
    missing: dict[str, str]


def server_at(url: str) -> Server:
    """What clients must know of a server that runs.

    Raises:
        OSError: nothing answers there.
    """
    url = url.rstrip("/").removesuffix("/v1")
    card = _get(url, "/v1/models")["data"][0]
    root = card.get("root")
    paths = _get(url, "/openapi.json")["paths"]
    return Server(
        url,
        card["id"],
        root if root and Path(root).is_dir() else None,
        {prefix: path for prefix, path in NEEDS.items() if path not in paths},
    )


@contextmanager
def started(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    """A server of this repository.

    Args:
        model: folder of a model.
        folder: for its state and the model with another template.
        flags: of ``scripts/serve``.
    """
    served = with_tools(model, folder / model.name)
    running = Running(folder, "--model", str(served), "--served-model-name", model.name, *flags)
    try:
        running.until(
            lambda: running.process.poll() is not None or bool(ready_lines(running.output())),
            _READY_DEADLINE_S,
            "ready",
        )
        assert running.process.poll() is None, running.story()
        yield server_at(running.url)
    finally:
        if running.process.poll() is None:
            running.stop()
        running.close()


def with_tools(model: Path, folder: Path) -> Path:
    """A folder with a model's files and a chat template that describes tools."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.name not in ("chat_template.jinja", "chat_template.json"):
            (folder / file.name).symlink_to(file.resolve())
    is_chatml = "<|im_start|>" in (model / "tokenizer.json").read_text()
    template = HERE / "templates" / ("chatml.jinja" if is_chatml else "demo.jinja")
    (folder / "chat_template.jinja").symlink_to(template)
    return folder


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=_LOOK_S) as response:
        return json.load(response)
