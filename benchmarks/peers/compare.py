"""Starts one server after the other, puts the same load on each, and compares the results.

    benchmarks/peers/compare --model MODEL [--servers pagestream,vllm] [-- options of ours]

Every server is started by the script of its name in this folder, with the model and a port. It is
measured by ``benchmarks.serving.load``, and ended with all its processes before the next begins.
With ``--rounds`` the servers alternate, so that a change in the machine's speed affects all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.models.model_folder import MODEL_HELP, model_folder
from benchmarks.serving.http_stream import StreamFailed, Target, ask
from benchmarks.serving.latencies import medians
from benchmarks.serving.server_process import NotServed, ready_server
from deploy.redis.ports import free_port
from shared.errors import PageStreamError

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Server:
    """The request format of a server.

    Attributes:
        model: its name of the model; ``{path}`` and ``{name}`` stand for the folder's.
        flags: of ``benchmarks.serving.load``, for features that it lacks.
    """

    model: str
    flags: tuple[str, ...] = ()


SERVERS = {
    "pagestream": Server("{name}"),
    "vllm": Server("model"),
    "llama_cpp": Server("model"),
    "transformers": Server("{path}", ("--prompt-as", "text", "--no-ignore-eos")),
}
_FIGURES = (
    ("output_tokens_per_s", "output tok/s"),
    ("ttft_ms_p50", "TTFT p50 ms"),
    ("tpot_ms_p50", "time/token p50 ms"),
    ("itl_ms_p99", "inter-token p99 ms"),
)
_OPENMP = ("OMP_", "GOMP_", "KMP_")


class LoadFailed(PageStreamError):
    """A request of the load failed."""


@contextmanager
def running(name: str, model: Path, options: Sequence[str], start_s: float) -> Iterator[str]:
    """Run a server inside the block, and yield its URL; all its processes end with the block.

    Raises:
        NotServed: it does not answer; with the end of its log.
    """
    port = free_port()
    command = [str(_HERE / f"{name}.sh"), str(model.absolute()), str(port), *options]
    # How threads wait is each server's choice: a setting for one made another two fifths slower.
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_OPENMP)}
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        return uvloop.run(_answers(url, _model_name(name, model)))

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / f"{name}.log"
        with ready_server(name, command, environ, log, is_ready, start_s):
            yield url


def _model_name(server: str, model: Path) -> str:
    return SERVERS[server].model.format(path=model.absolute(), name=model.name)


async def _answers(url: str, model: str) -> bool:
    """Whether a completion returns a token: some servers listen before the model is loaded."""
    body = {"model": model, "prompt": "a", "max_tokens": 2, "stream": True}
    try:
        answer = await ask(Target.of(url, "/v1/completions", None), body)
    except StreamFailed:
        return False
    return len(answer.events) > 1


def measure(url: str, name: str, model: Path, load: Sequence[str]) -> dict[str, Any]:
    """The results of ``benchmarks.serving.load``, by concurrency.

    Raises:
        LoadFailed: a request failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.serving.load", "--base-url", url]
        command += ["--model", _model_name(name, model), "--json", str(found), *load]
        done = subprocess.run(
            [*command, *SERVERS[name].flags], stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            raise LoadFailed(f"the load on {name} failed")
        concurrency: dict[str, Any] = json.loads(found.read_text())["concurrency"]
        return concurrency


def merge(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of all rounds, by concurrency."""
    merged: dict[str, Any] = {}
    for concurrency in rounds[0]:
        runs = [run for each in rounds for run in each[concurrency]["runs"]]
        merged[concurrency] = {"median": medians(runs), "runs": runs}
    return merged


def table(found: dict[str, dict[str, Any]]) -> Table:
    """Figures of all servers, and those of the first as multiples of each other one's."""
    first, *others = found
    shown = Table("streams", "figure", *found, *(f"{first} / {other}" for other in others))
    for concurrency in found[first]:
        for figure, title in _FIGURES:
            values = [found[name][concurrency]["median"][figure] for name in found]
            ratios = (f"{values[0] / value:.2f}" for value in values[1:])
            shown.add_row(concurrency, title, *(f"{value:.4g}" for value in values), *ratios)
    return shown


def main() -> None:
    """Measure all servers and print one table without failed ones, for which it exits with 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=model_folder, required=True, help=MODEL_HELP)
    parser.add_argument("--servers", default="pagestream,vllm", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--rounds", type=int, default=1, help="how often the servers take turns")
    parser.add_argument("--start-s", type=float, default=600, help="longest time until ready")
    parser.add_argument(
        "--settle-s", type=float, default=0, help="idle time then: ours takes its pool's memory"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--prompt-tokens", default="128")
    parser.add_argument("--output-tokens", default="128")
    parser.add_argument("--temperature", default="0", help="0: the likeliest tokens")
    parser.add_argument("--top-p", default="1", help="1: of all tokens")
    parser.add_argument("--runs", default="3", help="of each concurrency in a round")
    parser.add_argument("options", nargs="*", help="after --: options of scripts/serve")
    args = parser.parse_args()
    model, names = Path(args.model), args.servers.split(",")
    for name in names:
        if name not in SERVERS:
            parser.error(f"--servers={args.servers}: {name!r} is none of {', '.join(SERVERS)}")
    load = []
    flags = ("concurrency", "prompt_tokens", "output_tokens", "temperature", "top_p", "runs")
    for flag in flags:
        load += [f"--{flag.replace('_', '-')}", getattr(args, flag)]
    console = Console(stderr=True)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: set[str] = set()
    for number in range(args.rounds):
        for name in names:
            if name in failed:
                continue
            console.print(f"round {number + 1}: {name}")
            options = args.options if name == "pagestream" else []
            try:
                began_s = time.monotonic()
                with running(name, model, options, args.start_s) as url:
                    console.print(f"ready after {time.monotonic() - began_s:.0f} s")
                    time.sleep(args.settle_s)  # ours takes the memory of its pool after it is ready
                    rounds[name].append(measure(url, name, model, load))
            except (NotServed, LoadFailed) as error:
                console.print(str(error), style="red", markup=False)
                failed.add(name)
    found = {name: merge(each) for name, each in rounds.items() if each}
    if found:
        Console(width=140).print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
