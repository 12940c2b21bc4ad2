"""Log files are replaced while services write to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import log_files
from deploy.log_files import open_log, rotate, rotate_if_large
from deploy.settings import REPOSITORY
from shared.logs import LOG_FILE

NUM_LINES = 3_000
WRITER = f"""

from shared.logs import EventLog, setup_logging

setup_logging("service", "info")
log = EventLog("service")
for number in range({NUM_LINES}):
    log.info("line", number=number)
"""


def test_no_line_is_lost_while_files_are_replaced(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    output = open_log(log)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER],
        cwd=REPOSITORY,
        env={**os.environ, LOG_FILE: str(log)},
        stderr=output,
        stdout=output,
    ) as writer:
        os.close(output)
        kept = []
        while writer.poll() is None:
            if log.stat().st_size > 4096:
                rotate_if_large(log, 4096)
                number = len(kept)
                kept.append(log.with_name(f"old-{number}"))
                os.link(f"{log}.1", kept[-1])  # more generations than are kept otherwise
        assert writer.returncode == 0
    assert len(kept) > 3
    lines = "".join(path.read_text() for path in (*kept, log)).splitlines()
    numbers = [line.rpartition("=")[2] for line in lines]
    assert numbers == [str(number) for number in range(NUM_LINES)]
    assert log.stat().st_mode & 0o077 == 0


def test_a_few_generations_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    for text in "abcde":
        log.write_text(text)
        rotate(log)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"service.log.1": "e", "service.log.2": "d", "service.log.3": "c"}


def test_a_small_file_and_one_that_is_not_there_are_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    rotate_if_large(log, 10)
    log.write_text("short")
    rotate_if_large(log, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["service.log"]


def test_a_full_disk_leaves_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "service.log"
    log.write_text("text")

    def fail(_: Path) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_files, "open_log", fail)
    rotate_if_large(log, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["service.log"]
    assert log.read_text() == "text"
