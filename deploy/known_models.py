"""Models that ``--model`` takes by name: the demo model, and one that is made at its first use."""

import subprocess
import sys
from pathlib import Path

from deploy.processes.die_with_parent import dying_with_this_process
from deploy.processes.signals import Signals
from deploy.processes.spawner_messages import MessageReader
from deploy.settings import REPOSITORY
from deploy.terminal import Terminal
from shared.cache_folder import cache_folder
from shared.errors import PageStreamError

_POLL_S = 1.0
_MAKERS = {"smollm2": REPOSITORY / "models" / "smollm2.py"}


def known_models() -> dict[str, Path]:
    """Folder of each known model by its name; it may not exist before the model's first use."""
    made = {name: cache_folder() / "models" / name for name in _MAKERS}
    return {"demo": REPOSITORY / "models" / "demo", **made}


def maker_command(model: str) -> list[str]:
    """Command that makes the model's folder; empty if there is nothing to make.

    Args:
        model: path of a folder, or a hub id.
    """
    known = {str(folder): name for name, folder in known_models().items()}
    maker = _MAKERS.get(known.get(model, ""))
    if maker is None or (Path(model) / "config.json").is_file():
        return []
    return [sys.executable, str(maker), model]


def make_model(model: str, signals: Signals, terminal: Terminal) -> None:
    """Make the folder of a known model if it does not exist yet.

    Returns early if a signal to stop arrives.

    Args:
        model: path of a folder, or a hub id.

    Raises:
        PageStreamError: it could not be made; the error has the reason.
    """
    command = maker_command(model)
    if not command:
        return
    progress = MessageReader()
    process = subprocess.Popen(
        dying_with_this_process(command),
        stdin=subprocess.DEVNULL,
        stdout=progress.write_end,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the launcher passes Ctrl-C on
    )
    progress.inherited()
    with process:
        while process.poll() is None:
            signals.wait(_POLL_S, [progress])
            for line in progress.lines():
                terminal.show(line)
            if signals.num_stops:
                process.terminate()
                process.wait()
        for line in progress.lines():
            terminal.show(line)
        progress.close()
        assert process.stderr is not None
        errors = process.stderr.read().strip()
    if process.returncode and not signals.num_stops:
        raise PageStreamError(errors.rpartition("error: ")[2] or f"{' '.join(command)} failed")
