"""Who may import whom: the folders are the architecture."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONGEST_FILES

ROOT = Path(__file__).parents[1]
SERVICES = ("gateway", "scheduler_svc", "gpu_worker")
OURS = (*SERVICES, "shared", "kernels", "deploy", "benchmarks")
MOST_MODULES = 15  # of a folder, beside its __init__
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60  # kernels are exempt: each is one loop over tiles

MAY_IMPORT = {
    "gateway": {"gateway", "shared"},
    "scheduler_svc": {"scheduler_svc", "shared"},
    "gpu_worker": {"gpu_worker", "shared", "kernels"},
    "shared": {"shared"},
    # The table of sampling parameters: plain data, from which the sampler's arguments follow.
    "kernels": {"kernels", "shared.sampling"},
    # The launcher lists the settings of every service in its help, and nothing else of them.
    "deploy": {"deploy", "shared", "gateway.settings", "scheduler_svc.settings"}
    | {"gpu_worker.settings"},
}
ONLY_IN = {
    "torch": ("gpu_worker/", "kernels/"),
    "redis": ("shared/bus/",),
    "fastapi": ("gateway/",),
    "starlette": ("gateway/",),
    "uvicorn": ("gateway/http/",),
    "prometheus_client": ("shared/metrics.py",),
    "opentelemetry": ("gateway/tracing/otlp_tracer.py",),
}


def imports_of(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} holds nothing that could be looked at"
    return found


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    for path in files(package):
        for module in imports_of(path):
            if module.partition(".")[0] in OURS:
                assert within(module, MAY_IMPORT[package]), f"{path}: import of {module}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    for package in MAY_IMPORT:
        for path in files(package):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(ONLY_IN[library]):
                assert not any(within(found, {library}) for found in imports_of(path)), name


def test_the_scheduler_core_is_pure() -> None:
    impure = {"asyncio", "time", "logging", "random", "shared.logs", "shared.metrics", "os"}
    for path in files("scheduler_svc/core"):
        for module in imports_of(path):
            assert not within(module, impure), f"{path}: import of {module}"


def test_an_init_holds_a_docstring_and_nothing_else() -> None:
    for package in OURS:
        for path in (ROOT / package).rglob("__init__.py"):
            body = ast.parse(path.read_text())
            assert ast.get_docstring(body), path
            assert len(body.body) == 1, path


def test_every_folder_of_modules_is_a_package() -> None:
    for package in OURS:
        for path in files(package):
            if path.parent != ROOT / "deploy" / "docker":
                assert (path.parent / "__init__.py").exists(), path


def test_a_folder_holds_few_modules() -> None:
    modules = (path for package in (*OURS, "tests") for path in files(package))
    counts = Counter(path.parent for path in modules if path.name != "__init__.py")
    crowded = {str(folder): count for folder, count in counts.items() if count > MOST_MODULES}
    assert not crowded, "split these folders by what their modules are about"


def test_types_of_what_tests_share_are_checked() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    # Scripts that run kernels in Triton's interpreter have no types, as the kernels.
    elsewhere = {name for name in mypy["packages"] if name.startswith("tests.")}
    elsewhere.add("tests.kernels.triton")
    shared = set()
    for path in files("tests"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        is_test = path.name.startswith("test_") or path.name == "conftest.py"
        if not is_test and not within(module, elsewhere):
            shared.add(module)
    assert shared == set(mypy["modules"]), "pyproject.toml: modules of tool.mypy"


def test_a_file_is_short() -> None:
    long = {}
    for path in (path for package in (*OURS, "tests") for path in files(package)):
        num_lines = path.read_text().count("\n")
        if num_lines > MOST_FILE_LINES:
            long[path.relative_to(ROOT).as_posix()] = num_lines
    assert not long, f"split these files: they have more than {MOST_FILE_LINES} lines"


def test_a_function_is_short() -> None:
    long = {}
    packages = (package for package in (*OURS, "tests") if package != "kernels")
    for path in (path for package in packages for path in files(package)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MOST_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}: {node.name}"] = num_lines
    assert not long, f"split these functions: they have more than {MOST_FUNCTION_LINES} lines"


def test_transformers_runs_with_our_kernels_package_on_the_path() -> None:
    """``kernels`` is also the name of a package that transformers looks for."""
    code = """
import torch, transformers, kernels
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
)
model = transformers.LlamaForCausalLM(config)
assert model(torch.arange(5)[None]).logits.shape == (1, 5, 64)
assert "site-packages" not in kernels.__file__
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_test_files_that_begin_first_are_there() -> None:
    assert not [name for name in LONGEST_FILES if not (ROOT / name).is_file()]
