"""The runners of clients' programs, and what is made of their results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.answers.formats import call_format_of, reasoning_format_of
from tests.clients.__main__ import called
from tests.clients.client import CLIENTS, HERE, PROGRAMS, Client
from tests.clients.environment import Unavailable, prepared
from tests.clients.report import Result, Row, exit_code, markdown_table, rows_of
from tests.clients.server import Server, with_tools

PROGRAM = '''
from typing import Any

def good(server: Any) -> None:
    """a call"""
    assert server.base_url == "http://here/v1"

async def bad(server: Any) -> None:
    """a coroutine"""
    raise ValueError(f"no {server.model}\\nmore")

def known(server: Any) -> None:
    raise RuntimeError("old")

def responses(server: Any) -> None:
    """responses.create"""

def _helper(server: Any) -> None:
    raise AssertionError

def dies(server: Any) -> None:
    """a crash"""
    import os
    os._exit(7)
'''
PROGRAM_IN_NODE = """
export const calls = {
  "a call": async ({ base_url }) => { if (base_url !== "http://here/v1") throw new Error(); },
  "a failure": async ({ model }) => { throw new TypeError(`no ${model}\\nmore`); },
  "responses.create": async () => {},
};
"""
SERVER = Server("http://here", "demo", None, {"responses.": "/v1/responses"})


def results(rows: list[Row]) -> dict[str, tuple[Result, str]]:
    return {row.call: (row.result, row.detail) for row in rows}


def test_a_program_reports_each_call_and_where_it_ended(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    client = Client("some", "pytest", "program.py", {"known": "a fault of its own"})
    command = [sys.executable, "-P", str(PROGRAMS / "run.py")]
    rows = list(called(client, command, program, SERVER, tmp_path, 10))
    assert {row.version for row in rows} == {pytest.__version__}
    found = results(rows)
    log = tmp_path / "some.log"
    assert found == {
        "a call": (Result.OK, ""),
        "a coroutine": (Result.FAILED, "ValueError: no demo"),
        "known": (Result.KNOWN, "a fault of its own (RuntimeError: old)"),
        "responses.create": (Result.SKIPPED, "the server has no /v1/responses"),
        "a crash": (Result.FAILED, f"the program ended with 7; {log} has its output"),
    }
    assert "ValueError: no demo\nmore" in log.read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not on PATH")
def test_a_program_in_node_reports_each_call(tmp_path: Path) -> None:
    program = tmp_path / "program.mjs"
    program.write_text(PROGRAM_IN_NODE)
    package = tmp_path / "node_modules" / "some"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "1.2"}')
    command = ["node", str(PROGRAMS / "run.mjs")]
    rows = list(
        called(Client("some", "some", program.name), command, program, SERVER, tmp_path, 10)
    )
    assert {row.version for row in rows} == {"1.2"}
    assert results(rows) == {
        "a call": (Result.OK, ""),
        "a failure": (Result.FAILED, "TypeError: no demo"),
        "responses.create": (Result.SKIPPED, "the server has no /v1/responses"),
    }


def test_a_program_that_reports_nothing_failed() -> None:
    [row] = rows_of("some", [], {}, "it ended with 1")
    assert (row.call, row.result, row.detail) == ("import", Result.FAILED, "it ended with 1")


def test_the_exit_code_is_that_of_the_worst_result() -> None:
    rows = [Row("c", "1", result, result) for result in Result]
    assert exit_code(rows) == 1
    assert exit_code([row for row in rows if row.result is not Result.FAILED]) == 3
    fine = (Result.OK, Result.KNOWN, Result.SKIPPED)
    assert exit_code([row for row in rows if row.result in fine]) == 0


def test_the_table_has_a_line_for_each_client_and_result() -> None:
    rows = [
        Row("c", "1", "a", Result.OK),
        Row("c", "1", "b", Result.FAILED, "Error: x"),
        Row("c", "1", "d", Result.OK),
        Row("node", "", "", Result.UNAVAILABLE, "npm is not on PATH"),
    ]
    assert markdown_table(rows).splitlines()[2:] == [
        "| c | 1 | `a`, `d` | ok |",
        "| c | 1 | `b` | failed: Error: x |",
        "| node |  |  | unavailable: npm is not on PATH |",
    ]


def test_a_client_in_node_is_unavailable_without_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="node is not on PATH"):
        prepared(CLIENTS["openai-node"], tmp_path)


@pytest.mark.parametrize("client", CLIENTS.values(), ids=str)
def test_each_client_has_a_program_and_pins_its_package(client: Client) -> None:
    assert (PROGRAMS / client.program).is_file()
    pins = client.requirements.read_text()
    if client.is_node:
        assert client.package in json.loads(pins)["dependencies"]
    else:
        names = [line.partition("==")[0].partition("[")[0] for line in pins.splitlines()]
        assert client.package in names
        assert all("==" in line for line in pins.splitlines())


@pytest.mark.parametrize("name", ["demo", "chatml"])
def test_the_templates_are_recognized(name: str) -> None:
    template = (HERE / "templates" / f"{name}.jinja").read_text()
    assert call_format_of([template]) == "hermes"
    assert reasoning_format_of([template], ()) == "think"


def test_a_model_with_another_template_has_all_its_other_files(tmp_path: Path) -> None:
    model = HERE.parents[1] / "models" / "demo"
    folder = with_tools(model, tmp_path / "demo")
    assert {file.name for file in folder.iterdir()} == {file.name for file in model.iterdir()}
    assert "tool_call" in (folder / "chat_template.jinja").read_text()


def test_a_client_that_does_not_exist_is_refused_with_those_that_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.clients", "opnai"],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "there is no client 'opnai': openai-python" in done.stderr
