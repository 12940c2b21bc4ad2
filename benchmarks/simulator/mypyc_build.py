"""Compiles the simulator's inner modules as C extensions, by mypyc, from the same sources.

    python -m benchmarks.simulator.mypyc_build             once; needs mypy and a C compiler
    python -m benchmarks.simulator.mypyc_build --remove    back to the sources

Compiling takes a minute.

The result is a folder with the same layout as the sources, with compiled modules in the place of
some. If it exists, the simulator's commands restart themselves with that folder first on their
module search path. Services and tests never use it. The folder's name is a hash of the sources and
of the versions of Python and mypyc, so that an outdated one is not used.
"""

import argparse
import os
import shutil
import sys
import sysconfig
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from shared.errors import PageStreamError

ROOT = Path(__file__).resolve().parents[2]
_CACHE = ROOT / ".cache"
_PREFIX = "simulator-"
_PACKAGES = ("benchmarks", "scheduler_svc", "shared")  # that the commands need
# All modules that run in every iteration. The others are not compiled.
_COMPILED = {
    "scheduler_svc/core": ("**/*",),
    "benchmarks/simulator": (
        "findings/memory_use",
        "findings/occupancy",
        "findings/outcome",
        "pagestream",
        "system",
        "virtual_clock",
        "worker/beam_samples",
        "worker/plan_rows",
        "worker/worker_model",
    ),
}
_READ = (*_COMPILED, "shared")  # that compiled modules depend on


class CannotCompileError(PageStreamError):
    """A tool is missing, or mypyc cannot compile the sources."""


def folder() -> Path:
    """The folder for modules compiled from the present sources."""
    found = blake2b(digest_size=8)
    for part in (sysconfig.get_config_var("SOABI"), _version_of("mypy"), str(ROOT)):
        found.update(f"{part}\n".encode())
    for path in sorted(path for name in _READ for path in (ROOT / name).rglob("*.py")):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return _CACHE / f"{_PREFIX}{found.hexdigest()}"


def prefer_compiled() -> None:
    """Restart this command with compiled modules, if there are any; print which ones run.

    Does not return if it restarts.
    """
    place = folder()
    if str(place) in sys.path:
        print(f"runs compiled, from {place.relative_to(ROOT)}", file=sys.stderr)
    elif place.is_dir():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment(place))
    else:
        print(
            "runs interpreted; python -m benchmarks.simulator.mypyc_build makes it faster",
            file=sys.stderr,
        )


def environment(place: Path) -> dict[str, str]:
    """The environment of a process that imports compiled modules, and of its children."""
    paths = [str(place), str(ROOT), os.environ.get("PYTHONPATH", "")]
    # Without PYTHONSAFEPATH the current folder, with the sources, would be first.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def compile_into(place: Path, optimization: int = 2) -> None:
    """Make a folder of sources and compiled modules, complete or not at all.

    Args:
        place: must not exist.
        optimization: level of the C compiler, from 0 to 3.

    Raises:
        CannotCompileError: with the reason.
    """
    if (reason := _missing_tool()) is not None:
        raise CannotCompileError(reason)
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.parent) as scratch:
        tree = Path(scratch) / "tree"
        _build(tree, Path(scratch), optimization)
        for package in _PACKAGES:
            _link(ROOT / package, tree / package)
        tree.rename(place)


def _missing_tool() -> str | None:
    """A tool that is needed and missing, with what to do; None if there is none."""
    if _version_of("mypy") is None:
        return "mypy is not installed: it is one of the development requirements"
    compiler = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler: {compiler} is not on PATH"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"Python's headers are not installed: there is no {header}"
    return None


def _build(tree: Path, scratch: Path, optimization: int) -> None:
    # Imported here, because the commands run without them.
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.errors import BaseError

    modules = [
        str(path)
        for name, patterns in _COMPILED.items()
        for pattern in patterns
        for path in sorted((ROOT / name).glob(f"{pattern}.py"))
        if path.name != "__init__.py"
    ]
    try:
        extensions = mypycify(
            [f"--config-file={ROOT / 'pyproject.toml'}", "--follow-imports=silent", *modules],
            opt_level=str(optimization),
            debug_level="0",
            target_dir=str(scratch / "c"),
        )
        command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(tree), str(scratch / "objects")
        command.ensure_finalized()
        command.run()
    except (BaseError, SystemExit) as error:
        raise CannotCompileError(f"the sources cannot be compiled: {error}") from None


def _link(source: Path, target: Path) -> None:
    """Link everything beside compiled modules; a folder without any becomes one link."""
    if not target.exists():
        target.symlink_to(source)
    elif target.is_dir():
        for entry in source.iterdir():
            if entry.name != "__pycache__":
                _link(entry, target / entry.name)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Compile, or remove compiled modules; exits with 1 on an error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--remove", action="store_true", help="remove all compiled modules")
    args = parser.parse_args()
    place = folder()
    outdated = [found for found in _CACHE.glob(f"{_PREFIX}*") if args.remove or found != place]
    try:
        if not args.remove and not place.exists():
            compile_into(place)
    except CannotCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    for found in outdated:
        shutil.rmtree(found)
    if not args.remove:
        print(f"{place.relative_to(ROOT)} is used from now on")


if __name__ == "__main__":
    main()
