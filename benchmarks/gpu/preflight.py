"""Whether this GPU runs what the worker needs: the smallest case of everything, in a minute.

    python -m benchmarks.gpu.preflight [--device cpu] [--json FILE]

Each item runs in a process of its own with a time limit, because a fault of the device ends every
later call of its process. Items are named as they end; each failure with the last lines of its
output. Where ``compute-sanitizer`` is installed, an item that failed runs again under it. With
``--device cpu`` kernels run in Triton's interpreter, and what only a GPU has is skipped.

Exit codes: 0 if no item failed, else 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.preflight_items import ITEMS, why_not
from benchmarks.gpu.report_tables import write_json

_MOST_S = {"cuda": 60.0, "cpu": 180.0}  # of an item
_SANITIZED_S = 120.0
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Finding:
    """How one item ended.

    Attributes:
        outcome: "passed", "failed", "timed out" or "skipped".
        detail: the last lines of its output; of a skipped item, the reason.
        sanitizer: the last lines under compute-sanitizer; None: it did not run.
    """

    item: str
    outcome: str
    seconds: float
    detail: str
    sanitizer: str | None = None


def run_item(
    name: str, device: str, prefix: Sequence[str] = (), most_s: float | None = None
) -> Finding:
    """Run one item in a process of its own, if the device can run it."""
    reason = why_not(name, device)
    if reason is not None:
        return Finding(name, "skipped", 0.0, reason)
    command = [*prefix, sys.executable, "-m", __spec__.name, "--item", name, "--device", device]
    environment = dict(os.environ)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=most_s or _MOST_S[device],
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = b"".join(part for part in (error.stdout, error.stderr) if part is not None)
        detail = _tail(output.decode(errors="replace"))
        return Finding(name, "timed out", time.monotonic() - began_s, detail)
    outcome = "failed" if done.returncode else "passed"
    return Finding(name, outcome, time.monotonic() - began_s, _tail(done.stdout + done.stderr))


def preflight(device: str, items: Sequence[str], report: Callable[[Finding], None]) -> bool:
    """Run items one after the other; whether none failed."""
    sanitizer = shutil.which("compute-sanitizer") if device == "cuda" else None
    passed = True
    for name in items:
        found = run_item(name, device)
        if found.outcome not in ("passed", "skipped"):
            passed = False
            if sanitizer is not None:
                again = run_item(name, device, (sanitizer,), _SANITIZED_S)
                found = Finding(
                    found.item, found.outcome, found.seconds, found.detail, again.detail
                )
        report(found)
    return passed


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the items; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all findings")
    parser.add_argument("--item", choices=tuple(ITEMS), help="only this one, here")
    arguments = parser.parse_args(argv)
    if arguments.item is not None:
        ITEMS[arguments.item](arguments.device)
        return 0
    findings: list[Finding] = []

    def report(found: Finding) -> None:
        findings.append(found)
        print(f"{found.outcome:>9}  {found.item}  ({found.seconds:.1f} s)", flush=True)
        if found.outcome != "passed":
            print(found.detail, flush=True)
        if arguments.json is not None:
            write_json(arguments.json, [asdict(each) for each in findings])

    return 0 if preflight(arguments.device, tuple(ITEMS), report) else 1


if __name__ == "__main__":
    sys.exit(main())
