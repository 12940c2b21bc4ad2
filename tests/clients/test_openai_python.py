"""All calls of openai's own client, against real services."""

import sys
from pathlib import Path

from tests.clients.__main__ import called
from tests.clients.client import CLIENTS, HERE, PROGRAMS
from tests.clients.report import Result
from tests.clients.server import started

_TIMEOUT_S = 60


def test_every_call_of_openais_client_succeeds(tmp_path: Path) -> None:
    client = CLIENTS["openai-python"]
    command = [sys.executable, "-P", str(PROGRAMS / "run.py")]
    model = HERE.parents[1] / "models" / "demo"
    with started(model, tmp_path, "--dtype", "float32") as server:
        rows = list(
            called(client, command, PROGRAMS / client.program, server, tmp_path, _TIMEOUT_S)
        )
    assert rows
    failed = [row for row in rows if row.result not in (Result.OK, Result.SKIPPED)]
    assert not failed, (tmp_path / f"{client.name}.log").read_text()
