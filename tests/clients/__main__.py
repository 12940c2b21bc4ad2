"""``scripts/clients``: calls of other projects' clients to a served model, each in an environment
of its own, and a table of what became of them."""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.known_models import known_models, maker_command
from shared.state_folder import state_folder
from tests.clients.client import CLIENTS, Client
from tests.clients.environment import Unavailable, prepared, program_of
from tests.clients.report import (
    Result,
    Row,
    exit_code,
    json_table,
    markdown_table,
    rows_of,
    text_table,
)
from tests.clients.server import Server, server_at, started

_CLIENT_DEADLINE_S = 900.0


def main() -> int:
    """0 if every call passed, 1 if one failed by a fault of the server, 3 if a client could not be
    run here, 2 if the options are wrong or no server answers."""
    options = _options()
    if options.list:
        for client in CLIENTS.values():
            print(f"{client.name:<18} {client.requirements.read_text().split()[0]}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    clients = [CLIENTS[name] for name in options.clients or CLIENTS]
    logs = Path(options.out)
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if options.url is not None:
            try:
                server = server_at(options.url)
            except OSError as error:
                _show(f"error: --url {options.url}: {error}")
                return 2
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clients-")))
            server = stack.enter_context(started(_model(options.model), folder))
        rows = [row for client in clients for row in run(client, server, logs, options.timeout)]
    table = {"json": json_table, "markdown": markdown_table, "text": text_table}[options.format]
    print(table(rows))
    return exit_code(rows)


def run(client: Client, server: Server, logs: Path, timeout_s: int) -> Iterator[Row]:
    """Calls of one client, one after the other.

    Args:
        logs: folder in which the output of the client is kept.
        timeout_s: of one call.
    """
    _show(f"{client.name}: preparing")
    try:
        command = prepared(client)
    except Unavailable as reason:
        _show(f"{client.name}: {reason}")
        yield Row(client.name, "", "", Result.UNAVAILABLE, str(reason))
        return
    _show(f"{client.name}: running")
    for row in called(client, command, program_of(client), server, logs, timeout_s):
        if row.result is Result.FAILED:
            _show(f"{client.name}: {row.call} failed: {row.detail}")
        yield row


def called(
    client: Client,
    command: Sequence[str],
    program: Path,
    server: Server,
    logs: Path,
    timeout_s: int,
) -> Iterator[Row]:
    """Rows of a client's program.

    Args:
        command: the interpreter with its runner.
    """
    results, log = logs / f"{client.name}.jsonl", logs / f"{client.name}.log"
    results.write_text("")
    options = {
        "program": str(program),
        "package": client.package,
        "url": server.url,
        "model": server.model,
        "tokenizer": server.tokenizer,
        "missing": server.missing,
        "timeout_s": timeout_s,
        "out": str(results),
    }
    ending = f"the program did not end; {log} has its output"
    with log.open("w") as output, contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*command, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_CLIENT_DEADLINE_S,
            check=False,
        )
        ending = f"the program ended with {done.returncode}; {log} has its output"
    yield from rows_of(client.name, results.read_text().splitlines(), client.known, ending)


def _model(name: str) -> Path:
    folder = known_models().get(name) or Path(name).expanduser().absolute()
    if command := maker_command(str(folder)):
        _show(f"making {name}, once")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    add = parser.add_argument
    add("clients", nargs="*", metavar="CLIENT", help=f"all by default: {', '.join(CLIENTS)}")
    add("--url", help="of a server that runs; by default one is started")
    add("--model", default="demo", help="what that one serves: demo, smollm2 or a folder")
    add("--timeout", type=int, default=120, metavar="S", help="seconds that a call may take")
    add("--list", action="store_true", help="print the clients and the packages they pin")
    table = parser.add_mutually_exclusive_group()
    for name, text in (("json", "a list of objects"), ("markdown", "a line for each client")):
        table.add_argument(
            f"--{name}", action="store_const", const=name, dest="format", default="text", help=text
        )
    add("--out", default=str(state_folder(None) / "clients"), help="folder of the clients' output")
    options = parser.parse_args()
    if unknown := [name for name in options.clients if name not in CLIENTS]:
        parser.error(f"there is no client {unknown[0]!r}: {', '.join(CLIENTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
