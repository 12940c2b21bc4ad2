"""Decode steps of a worker by the format of its weights: tokens per second, whole steps in process.

    python -m benchmarks.micro.weight_formats --model FOLDER [--formats none,int8,int4]

``python -m benchmarks.models.random_model FOLDER --shape 162m`` writes a model that is larger than
the caches. Formats take turns; the first is the reference.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.micro.driven_worker import DrivenWorker, random_prompts, steady_steps
from benchmarks.models.model_folder import MODEL_HELP, model_folder
from gpu_worker.model.quantization.requested_format import FORMATS
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker

_BLOCK_SIZE = 16
_MOST_BATCHED_TOKENS = 512
_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that decode together.

    Attributes:
        streams: their number.
        prompt: tokens of each.
        new: tokens that each generates.
    """

    streams: int
    prompt: int
    new: int


def build(folder: str, form: str, dtype: str | None, loads: Sequence[Load]) -> Worker:
    """A worker with a pool that holds each of the loads."""
    blocks = max(each.streams * -(-(each.prompt + each.new) // _BLOCK_SIZE) for each in loads)
    settings = WorkerSettings(
        model=folder,
        quantization=form,
        dtype=dtype,
        block_size=_BLOCK_SIZE,
        num_blocks=blocks + 8,
        num_host_blocks=0,
        max_num_batched_tokens=_MOST_BATCHED_TOKENS,
        max_num_sequences=max(each.streams for each in loads),
    )
    return build_worker(settings)


def step_seconds(worker: Worker, load: Load, seed: int) -> list[float]:
    """Of steps in which all streams decode."""
    driven = DrivenWorker(worker.executor, load.streams, _MOST_BATCHED_TOKENS)
    prompts = random_prompts(load.streams, load.prompt, worker.model.vocab_size, seed)
    steps = driven.run(prompts, load.new).steps
    pairs = steady_steps(steps, load.streams, _WARM_UP, load.new)
    return [step.ended_s - before.ended_s for before, step in pairs]


def measure(
    folder: str, formats: Sequence[str], dtype: str | None, loads: Sequence[Load], rounds: int
) -> dict[str, dict[int, float]]:
    """Tokens per second by format and number of streams, from the median step."""
    workers = {form: build(folder, form, dtype, loads) for form in formats}
    times: dict[str, dict[int, list[float]]] = {
        form: {load.streams: [] for load in loads} for form in formats
    }
    for turn in range(rounds):
        for load in loads:
            for form, worker in workers.items():
                times[form][load.streams] += step_seconds(worker, load, turn)
    return {
        form: {streams: streams / median(seconds) for streams, seconds in by_streams.items()}
        for form, by_streams in times.items()
    }


def main() -> None:
    """Measure and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=model_folder, required=True, help=MODEL_HELP)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--dtype", help="of everything else; by default as the worker chooses")
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    loads = [Load(int(number), args.prompt, args.new) for number in args.streams.split(",")]
    formats = args.formats.split(",")
    found = measure(args.model, formats, args.dtype, loads, args.rounds)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{'tokens/s':<10}" + "".join(f"{f'{load.streams} streams':>22}" for load in loads))
    for form, by_streams in found.items():
        cells = (
            f"{speed:.1f} ({speed / found[formats[0]][streams]:.2f} x)"
            for streams, speed in by_streams.items()
        )
        print(f"{form:<10}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
