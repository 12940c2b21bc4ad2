"""Runs one client's calls; imports nothing of this repository, because the client's environment
has none of it.

    python -P run.py OPTIONS

OPTIONS is JSON: ``program`` (a Python file), ``package`` (whose version is shown), ``url`` and
``model`` (of the server), ``tokenizer`` (folder, or null), ``missing`` (paths that the server
lacks, by the beginning of the names of calls that need them), ``timeout_s`` (of one call), ``out``
(file for the results, JSON lines).

Every public function of the program is a call: the first line of its docstring is its name, its
only argument has ``url``, ``base_url``, ``model`` and ``tokenizer``. It may be a coroutine. What it
raises is its result.
"""

import asyncio
import importlib.metadata
import importlib.util
import inspect
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

MOST_CHARS = 400  # of an error that is shown


def main() -> None:
    """Run all calls of a program."""
    options = json.loads(sys.argv[1])
    with open(options["out"], "a", buffering=1) as out:

        def report(**found: Any) -> None:
            print(json.dumps(found), file=out)

        report(version=importlib.metadata.version(options["package"]))
        signal.signal(signal.SIGALRM, _expired)
        server = SimpleNamespace(
            base_url=options["url"] + "/v1",
            **{key: options[key] for key in ("url", "model", "tokenizer")},
        )
        for name, function in _calls(_loaded(options["program"])).items():
            if path := _lacks(name, options["missing"]):
                report(call=name, result="skipped", detail=f"the server has no {path}")
                continue
            report(begun=name)
            start_s = time.monotonic()
            detail = _error_of(function, server, options["timeout_s"])
            took_s = round(time.monotonic() - start_s, 2)
            report(call=name, result="failed" if detail else "ok", detail=detail, seconds=took_s)


def _loaded(program: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("calls", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where clients look up the types in annotations
    spec.loader.exec_module(module)
    return module


def _calls(program: ModuleType) -> Mapping[str, Callable[[Any], Any]]:
    found = {}
    for name, value in vars(program).items():
        is_own = inspect.isfunction(value) and value.__module__ == program.__name__
        if is_own and not name.startswith("_"):
            found[(value.__doc__ or name).splitlines()[0]] = value
    return found


def _lacks(name: str, missing: Mapping[str, str]) -> str:
    return next((path for prefix, path in missing.items() if name.startswith(prefix)), "")


def _error_of(function: Callable[[Any], Any], server: Any, timeout_s: int) -> str:
    """The first line of the error of a call; empty if there is none."""
    signal.alarm(timeout_s)
    try:
        done = function(server)
        if inspect.iscoroutine(done):
            asyncio.run(done)
    except Exception as error:
        traceback.print_exc()
        line, *_ = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {line}"[:MOST_CHARS]
    finally:
        signal.alarm(0)
    return ""


def _expired(*_: object) -> NoReturn:
    raise TimeoutError("the call did not end in time")


if __name__ == "__main__":
    main()
