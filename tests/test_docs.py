"""The docs name what there is: files, functions, flags, links; and they stay short."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "design").glob("*.md"),
]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
CODE = re.compile(r"`([^`\n]+)`")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_every_file_that_is_named_exists(page: Path) -> None:
    for span in CODE.findall(page.read_text()):
        word = span.split()[0]
        folder = word.partition("/")[0]
        if "/" in word and folder in FOLDERS and re.fullmatch(r"[\w./-]+", word):
            assert (ROOT / word).exists(), f"{page.name}: {word}"


@pages
def test_every_module_that_is_run_exists(page: Path) -> None:
    for module in re.findall(r"python -m ([\w.]+)", page.read_text()):
        path = ROOT.joinpath(*module.split("."))
        if path.parts[len(ROOT.parts)] in FOLDERS:
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_flag_of_the_settings_pages_exists() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "deploy.serve", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = set(re.findall(r"--[a-z][\w-]+", help_text))
    for name in ("README.md", "docs/SETTINGS.md", "docs/STREAMS.md", "docs/API.md"):
        for span in CODE.findall((ROOT / name).read_text()):
            if span.startswith("--"):
                assert set(re.findall(r"--[a-z][\w-]+", span)) <= known, f"{name}: {span}"


def test_the_tour_ends_at_lines_that_exist() -> None:
    tour = (ROOT / "CONTRIBUTING.md").read_text().partition("## A tour in five questions")[2]
    rows = [line for line in tour.partition("\n## ")[0].splitlines() if " → " in line]
    assert len(rows) == 5
    for row in rows:
        hops = row.split("|")[2].split(" → ")
        assert len(hops) <= 3, row
        names: set[str] = set()
        for hop in hops:
            for span in CODE.findall(hop):
                path = ROOT / span
                if path.suffix == ".py":
                    names = _names(path)
                elif not path.exists():
                    assert span in names, f"{row}: {span} is not in the file before it"


def test_the_architecture_page_names_every_package() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    for top in (
        "gateway",
        "scheduler_svc",
        "gpu_worker",
        "kernels",
        "shared",
        "deploy",
        "benchmarks",
    ):
        part = text.partition(f"**{top}/**")[2].partition("\n\n")[0]
        for folder in (ROOT / top).iterdir():
            if (folder / "__init__.py").exists():
                assert f"`{folder.name}/`" in part, f"{top}/{folder.name}"


def test_the_first_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
    assert (ROOT / "docs" / "ARCHITECTURE.md").stat().st_size <= 12 * 1024


def _names(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}
