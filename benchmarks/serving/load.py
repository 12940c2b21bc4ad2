"""Load over HTTP on any server with OpenAI's API: measures latencies and throughput.

    python -m benchmarks.serving.load --base-url http://127.0.0.1:8000 --concurrency 1,16,64

So many clients at once each send ``--requests-per-client`` requests, one after the other, with
prompts of random tokens that no two requests share. Every concurrency is measured ``--runs`` times
after a warm-up that is not counted; medians over the runs are shown. Times count from handing a
request to the operating system, on an open connection, to the event that brings text. Time per
token is that from the first to the last, by the number of tokens in the server's own usage.

This process shares the machine with what it measures. It parses events only after a run, and shows
how much of a core it used (``client_cpu_share``).
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.serving.http_stream import RawAnswer, StreamFailed, Target, ask
from benchmarks.serving.latencies import medians, read_answer, summarize

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_WORD = "ab "  # of prompts that are sent as text
_SHOWN = (
    ("output_tokens_per_s", "output tok/s"),
    ("ttft_ms_p50", "TTFT p50 ms"),
    ("ttft_ms_p99", "TTFT p99"),
    ("tpot_ms_p50", "time/token p50 ms"),
    ("tpot_ms_p99", "time/token p99"),
    ("itl_ms_p50", "inter-token p50 ms"),
    ("itl_ms_p99", "inter-token p99"),
    ("client_cpu_share", "client's cores"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """The parameters of every request.

    Attributes:
        prompt_as: ``tokens`` sends ids; ``text`` sends words, whose number is fitted in advance.
        token_ids: half-open range that prompts are drawn from.
        temperature: zero: greedy.
        top_p: one: all tokens.
        fields: further ones of the body.
    """

    endpoint: str
    model: str
    prompt_tokens: int
    output_tokens: int
    prompt_as: str = "tokens"
    token_ids: tuple[int, int] = (300, 1_000)
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, rng: random.Random, num_words: int) -> dict[str, Any]:
        """The body of a request with a prompt of its own."""
        prompt: list[int] | str
        if self.prompt_as == "tokens":
            prompt = [rng.randrange(*self.token_ids) for _ in range(self.prompt_tokens)]
        else:
            prompt = "".join(rng.choice("abcdefgh") + _WORD[1:] for _ in range(num_words))
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.top_p < 1:
            body["top_p"] = self.top_p
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return {**body, **self.fields}


class Measurement:
    """Runs of one load on one server.

    Args:
        target: address of the requests.
        load: parameters of the requests.
        rng: to draw prompts with.
        requests_per_client: that one client sends one after the other.
    """

    def __init__(
        self, target: Target, load: Load, rng: random.Random, requests_per_client: int = 1
    ) -> None:
        self._target = target
        self._load = load
        self._rng = rng
        self._requests_per_client = requests_per_client
        self._num_words = load.prompt_tokens

    async def fit_prompt(self) -> None:
        """Find how many words make a prompt of the wanted length.

        Raises:
            StreamFailed: the server does not answer.
        """
        if self._load.prompt_as == "tokens":
            return
        for _ in range(3):
            body = self._load.body(self._rng, self._num_words)
            found = read_answer(await ask(self._target, {**body, "max_tokens": 2})).prompt_tokens
            if found == self._load.prompt_tokens:
                return
            fitting = self._num_words * self._load.prompt_tokens / found
            self._num_words = max(1, round(fitting))

    async def run(self, concurrency: int, ended: Callable[[], None]) -> dict[str, float]:
        """Run all clients once; the figures of the run.

        Args:
            ended: called at the end of every request.

        Raises:
            StreamFailed: a request failed, or has a wrong length.
        """
        bodies = [
            [self._load.body(self._rng, self._num_words) for _ in range(self._requests_per_client)]
            for _ in range(concurrency)
        ]

        async def client(own: Sequence[dict[str, Any]]) -> list[RawAnswer]:
            answers = []
            for body in own:
                answers.append(await ask(self._target, body))
                ended()
            return answers

        cpu_s = time.process_time()
        found = await asyncio.gather(*map(client, bodies))
        cpu_s = time.process_time() - cpu_s
        streams = [read_answer(answer) for answers in found for answer in answers]
        short = [stream for stream in streams if stream.output_tokens != self._load.output_tokens]
        if short and self._load.ignore_eos:
            got = short[0].output_tokens
            raise StreamFailed(f"{got} tokens instead of {self._load.output_tokens}")
        return summarize(streams, cpu_s)


async def find_model(target: Target) -> str:
    """The first model that the server lists.

    Raises:
        StreamFailed: it lists none.
    """
    try:
        listed = json.loads((await ask(target, None)).body)
        return str(listed["data"][0]["id"])
    except (ValueError, KeyError, IndexError):
        raise StreamFailed("the server lists no model; give --model") from None


async def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run all concurrencies; the results as one object.

    Raises:
        StreamFailed: a request failed.
    """
    key = args.api_key
    model = args.model or await find_model(Target.of(args.base_url, "/v1/models", key))
    low, _, high = args.token_ids.partition(":")
    load = Load(
        args.endpoint,
        model,
        args.prompt_tokens,
        args.output_tokens,
        args.prompt_as,
        (int(low), int(high)),
        args.ignore_eos,
        args.temperature,
        args.top_p,
    )
    target = Target.of(args.base_url, _PATHS[args.endpoint], key)
    rng = random.Random(args.seed)
    measurement = Measurement(target, load, rng, args.requests_per_client)
    await measurement.fit_prompt()
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Twice a second shows the progress; more would take time from the server.
    bar = Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=2)
    with bar:
        for concurrency in args.concurrency:
            per_run = concurrency * args.requests_per_client
            task = bar.add_task(f"{concurrency:>4} streams", total=per_run * args.runs)
            for _ in range(args.warmup):
                await measurement.run(concurrency, lambda: None)
            runs = [
                await measurement.run(concurrency, partial(bar.advance, task))
                for _ in range(args.runs)
            ]
            results[str(concurrency)] = {"median": medians(runs), "runs": runs}
    return {"base_url": args.base_url, "load": asdict(load), "concurrency": results}


def table(found: dict[str, Any]) -> Table:
    """The medians, one row per concurrency."""
    shown = Table("streams", *(title for _, title in _SHOWN))
    for concurrency, result in found["concurrency"].items():
        figures = result["median"]
        cells = (f"{figures[name]:.3g}" if name in figures else "-" for name, _ in _SHOWN)
        shown.add_row(concurrency, *cells)
    return shown


def main() -> None:
    """Measure, print a table, and write JSON if wanted; exits with 1 if a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--model", help="as the server names it; by default the first it lists")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--endpoint", choices=_PATHS, default="completions")
    parser.add_argument("--concurrency", type=counts, default=[1, 16, 64], help="e.g. 1,16,64")
    parser.add_argument("--requests-per-client", type=int, default=1, help="one after the other")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument(
        "--prompt-as",
        choices=("tokens", "text"),
        default="tokens",
        help="text: for servers without token ids",
    )
    parser.add_argument("--token-ids", default="300:1000", help="prompts are drawn from LOW:HIGH")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: of all tokens")
    parser.add_argument("--warmup", type=int, default=1, help="runs that are not counted")
    parser.add_argument("--runs", type=int, default=3, help="runs whose medians are shown")
    parser.add_argument("--seed", type=int, default=None, help="of the prompts; by default random")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    console = Console(stderr=True)
    try:
        found = uvloop.run(measure(args, console))
    except StreamFailed as error:
        console.print(f"failed: {error}", style="red", markup=False)
        sys.exit(1)
    Console().print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def counts(text: str) -> list[int]:
    """The value of an option: comma-separated numbers from 1 on.

    Raises:
        argparse.ArgumentTypeError: a number is smaller.
    """
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: counts are at least 1")
    return found


if __name__ == "__main__":
    main()
