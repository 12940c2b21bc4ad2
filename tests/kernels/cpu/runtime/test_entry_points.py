"""The cache key of CPU kernels covers every source that they may be compiled from."""

import shutil
from pathlib import Path

import kernels.cpu
from kernels.cpu.runtime.entry_points import digest_of, source_version

SOURCES = Path(kernels.cpu.__file__).parent


def test_every_source_and_its_name_count(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    found = {digest_of(folder)}
    assert found == {digest_of(SOURCES)}
    sources = sorted(folder.rglob("*.py"))
    assert len(sources) > 40
    for path in sources:
        before = path.read_bytes()
        path.write_bytes(before + b"#\n")
        found.add(digest_of(folder))
        path.write_bytes(before)
    sources[-1].rename(sources[-1].with_name("renamed.py"))
    found.add(digest_of(folder))
    assert len(found) == len(sources) + 2


def test_the_version_is_the_same_in_every_call_and_never_zero() -> None:
    assert source_version() == source_version() != 0
