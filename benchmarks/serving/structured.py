"""What structured output costs: streams over HTTP with a JSON schema and without, in turns.

    python -m benchmarks.serving.structured --model FOLDER [--base-url http://127.0.0.1:8000]

Both have equal prompts and equally many tokens, at temperature 1. Then, in this process, for the
model's tokenizer: the time to compile schemas, and to compute each mask of texts that follow the
schema, with a random one of the allowed tokens after each.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from rich.console import Console

from benchmarks.models.model_folder import MODEL_HELP, model_folder
from benchmarks.serving.http_stream import StreamFailed, Target
from benchmarks.serving.load import Load, Measurement, find_model
from gateway.grammars.constraints import JsonSchema
from gpu_worker.model.tokenizer_file import TokenizerFile

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "color": {"enum": ["red", "green", "blue", "black", "white"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "color", "friends"],
    "additionalProperties": False,
}
# No text of a measurement ends before its limit.
SCHEMA: dict[str, Any] = {"type": "array", "items": _PERSON, "minItems": 1_000}
_PROMPT_TOKENS = 32
_TEXTS = 20  # whose masks are timed


async def streams(args: argparse.Namespace) -> dict[str, list[float]]:
    """Output tokens per second of each run, with a schema and without.

    Raises:
        StreamFailed: a request failed, or a text has another length.
    """
    target = Target.of(args.base_url, "/v1/completions", None)
    model = await find_model(Target.of(args.base_url, "/v1/models", None))
    plain = {"model": model, "prompt_tokens": _PROMPT_TOKENS, "output_tokens": args.output_tokens}
    loads = {
        "without": Load("completions", **plain, temperature=1.0),
        "with a schema": Load(
            "completions",
            **plain,
            temperature=1.0,
            fields={"guided_json": SCHEMA, "ignore_eos": False},
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(1 + args.rounds):
        for name, load in loads.items():
            run = await Measurement(target, load, random.Random(number)).run(args.streams, _nothing)
            if number:  # the first one warms up
                found[name].append(run["output_tokens_per_s"])
    return found


def _nothing() -> None:
    """Nobody watches the progress."""


def schema_of_bytes(num_bytes: int) -> dict[str, Any]:
    """A schema of nested objects, whose text has about so many bytes."""
    properties: dict[str, Any] = {}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    while len(json.dumps(schema)) < num_bytes:
        name = f"person_{len(properties)}"
        properties[name] = {**_PERSON, "description": f"The {len(properties)}th of all."}
    return schema


def compile_ms(tokenizer: LLTokenizer, schema: dict[str, Any]) -> float:
    """Milliseconds until the first mask is there, from the schema."""
    began = time.perf_counter()
    LLMatcher(tokenizer, JsonSchema(schema).grammar(), log_level=0).compute_bitmask()
    return 1e3 * (time.perf_counter() - began)


def mask_us(tokenizer: LLTokenizer, num_tokens: int) -> list[float]:
    """Microseconds of each mask of some texts."""
    first = LLMatcher(tokenizer, JsonSchema(SCHEMA).grammar(), log_level=0)
    draw, found = random.Random(0), []
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for _ in range(_TEXTS):
        matcher = first.deep_copy()
        for _ in range(num_tokens):
            began = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            found.append(1e6 * (time.perf_counter() - began))
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            matcher.consume_token(int(draw.choice(allowed)))
    return found


def main() -> None:
    """Measure and print; exits with 1 if a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=model_folder, required=True, help=MODEL_HELP)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="serves the model")
    parser.add_argument("--streams", type=int, default=16, help="at once")
    parser.add_argument("--output-tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="how often both take turns")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    console = Console()
    try:
        runs = asyncio.run(streams(args))
    except StreamFailed as error:
        console.print(f"failed: {error}", style="red", markup=False)
        sys.exit(1)
    tokenizer = LLTokenizer(TokenizerFile(args.model).text)
    compiled = {
        f"{kib} KB": median(compile_ms(tokenizer, schema_of_bytes(kib * 1_000)) for _ in range(5))
        for kib in (1, 10, 50)
    }
    masks = mask_us(tokenizer, args.output_tokens)
    without, structured = (median(runs[name]) for name in ("without", "with a schema"))
    console.print(
        f"{args.streams} streams: {without:.0f} tokens/s without, {structured:.0f} with a schema "
        f"({structured / without:.2f} ×; rounds "
        + ", ".join(
            f"{b / a:.2f}" for a, b in zip(runs["without"], runs["with a schema"], strict=True)
        )
        + ")"
    )
    for size, milliseconds in compiled.items():
        console.print(f"a schema of {size} is compiled in {milliseconds:.1f} ms")
    console.print(
        f"a mask takes {median(masks):.0f} µs (median), {np.percentile(masks, 99):.0f} µs (p99) "
        f"of {tokenizer.vocab_size} tokens"
    )
    if args.json:
        found = {"tokens_per_s": runs, "compile_ms": compiled, "mask_us": masks}
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
