"""Times decode steps by sampling method, in one process, on this CPU.

    python -m benchmarks.micro.sampling --model FOLDER [--batches 1,16,64] [--rounds 3] \\
        [--json FILE]

All sequences of a step use the same method. The methods alternate, and medians over all steps of
all rounds are shown, with the time that each method adds to greedy decoding.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.micro.driven_worker import DrivenWorker, random_prompts, steady_steps
from benchmarks.models.model_folder import MODEL_HELP, model_folder
from benchmarks.serving.load import counts
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from shared.sampling import SamplingParams

_GREEDY = SamplingParams.greedy(1)
_SAMPLED = replace(_GREEDY, temperature=1.0)
METHODS = {
    "greedy": _GREEDY,
    "temperature 1": _SAMPLED,
    "and top_p 0.95": replace(_SAMPLED, top_p=0.95),
    "and top_k 50": replace(_SAMPLED, top_k=50),
    "and min_p 0.05": replace(_SAMPLED, min_p=0.05),
    "with penalties": replace(_SAMPLED, repetition_penalty=1.1, frequency_penalty=0.5),
    "greedy, 5 log-probabilities": replace(_GREEDY, num_logprobs=5),
}
_PROMPT_TOKENS = 128
_WARM_UP = 2


def measure(
    driven: DrivenWorker, vocabulary: int, num_sequences: int, num_new: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of decode steps, by sampling method."""
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(rounds):
        prompts = random_prompts(num_sequences, _PROMPT_TOKENS, vocabulary, seed)
        for method, sampling in METHODS.items():
            run = driven.run(prompts, num_new, sampling)
            steady = steady_steps(run.steps, num_sequences, _WARM_UP, num_new)
            found[method] += [step.ended_s - before.ended_s for before, step in steady]
    return found


def table(found: dict[int, dict[str, list[float]]]) -> Table:
    """Milliseconds of a step, one row per method and one column per batch."""
    shown = Table("tokens", *(f"{num} sequences" for num in found))
    for method in METHODS:
        cells = []
        for seconds in found.values():
            step_s, least_s = median(seconds[method]), median(seconds["greedy"])
            cells.append(f"{1e3 * step_s:.2f} ms ({step_s / least_s - 1:+.1%})")
        shown.add_row(method, *cells)
    return shown


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=model_folder, required=True, help=MODEL_HELP)
    parser.add_argument("--batches", type=counts, default=[1, 16, 64], help="e.g. 1,16,64")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each sequence in a round")
    parser.add_argument("--rounds", type=int, default=3, help="how often the methods take turns")
    parser.add_argument("--dtype", help="type of weights and KV cache, as for scripts/serve")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    most = max(args.batches)
    settings = WorkerSettings(
        model=args.model, device="cpu", dtype=args.dtype, max_num_sequences=most
    )
    worker = build_worker(settings)
    driven = DrivenWorker(worker.executor, most, settings.max_num_batched_tokens)
    vocabulary = worker.model.vocab_size
    console, found = Console(stderr=True), {}
    for num in args.batches:
        console.print(f"{num} sequences")
        found[num] = measure(driven, vocabulary, num, args.new_tokens, args.rounds)
    driven.close()
    Console().print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
