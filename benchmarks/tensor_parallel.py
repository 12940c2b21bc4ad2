"""Times decode steps of one worker on all threads, and of several ranks that share the threads.

    python -m benchmarks.tensor_parallel MODEL [--ranks 2] [--threads 2] [--dtype bfloat16]

The ranks are processes of this machine, as under scripts/serve, with gloo between them; there is no
bus and no gateway. A sum's time includes waiting for the slower rank.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from gpu_worker.ranks.collectives import TorchCollectives
from gpu_worker.ranks.member import Member
from gpu_worker.ranks.ranked_executor import RankedExecutor
from gpu_worker.ranks.ranks import Ranks
from gpu_worker.ranks.reducer import HostReducer
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from gpu_worker.startup.warm_up_plans import decode_plan, prefill_plan
from gpu_worker.step.plan_executor import PlanExecutor
from shared.sampling import SamplingParams

_HOST = "127.0.0.1"
_PROMPT_TOKENS = 16
_BLOCKS_EACH = 16  # of 16 tokens
_WARM_UP = 10


@dataclass(frozen=True, slots=True)
class Job:
    """A rank's part of the measurement; one rank is a worker alone."""

    model: str
    dtype: str
    num_ranks: int
    rank: int
    num_threads: int
    port: int
    batches: tuple[int, ...]
    num_steps: int


@dataclass(frozen=True, slots=True)
class Times:
    """Median milliseconds of the decode steps of one batch size, and of the sums in them."""

    num_seqs: int
    step_ms: float
    sums_ms: float


def main() -> int:
    """Measure and print a table."""
    options = _parsed()
    batches = tuple(options.batches)
    print(f"{options.model}, {options.dtype}, {options.threads} threads in all")
    print("| sequences | ranks | threads each | step ms | in sums ms | tokens/s |\n|" + "---:|" * 6)
    for num_ranks in (1, options.ranks):
        threads = max(1, options.threads // num_ranks)
        jobs = [
            Job(
                options.model,
                options.dtype,
                num_ranks,
                rank,
                threads,
                options.port,
                batches,
                options.steps,
            )
            for rank in range(num_ranks)
        ]
        with ProcessPoolExecutor(num_ranks, mp_context=get_context("spawn")) as pool:
            found, weights = next(iter(pool.map(measure, jobs)))
        for each in found:
            per_s = each.num_seqs / each.step_ms * 1e3
            print(
                f"| {each.num_seqs} | {num_ranks} | {threads} | {each.step_ms:.2f} | "
                f"{each.sums_ms:.2f} | {per_s:.0f} |",
                flush=True,
            )
        print(f"weights of rank 0: {weights / 2**20:.0f} MiB")
    return 0


def measure(job: Job) -> tuple[list[Times], int]:
    """Times of a rank, and the bytes of its weights."""
    settings = WorkerSettings(
        model=job.model,
        dtype=job.dtype,
        device="cpu",
        num_threads=job.num_threads,
        num_blocks=max(job.batches) * _BLOCKS_EACH,
        max_model_len=_BLOCKS_EACH * 16,
        max_num_batched_tokens=max(512, max(job.batches) * _PROMPT_TOKENS),
        num_host_blocks=0,
        tensor_parallel_size=job.num_ranks,
        rank=job.rank,
    )
    ranks = _connected(job) if job.num_ranks > 1 else None
    worker = build_worker(settings, ranks=ranks)
    executor: PlanExecutor = worker.executor
    reducer = None
    if ranks is not None:
        executor = RankedExecutor(worker.executor, ranks.collectives, ranks.failure)
        reducer = ranks.reducer
    assert reducer is None or isinstance(reducer, HostReducer)
    found = [_decodes(executor, reducer, num_seqs, job.num_steps) for num_seqs in job.batches]
    return found, worker.weight_bytes


def _connected(job: Job) -> Ranks:
    store = TCPStore(
        _HOST, job.port, job.num_ranks, is_master=job.rank == 0, wait_for_workers=False
    )
    member = Member(job.rank, job.num_ranks, "benchmark")
    device = torch.device("cpu")
    return Ranks.of(TorchCollectives(member, store, _HOST, device), device)


def _decodes(
    executor: PlanExecutor, reducer: HostReducer | None, num_seqs: int, num_steps: int
) -> Times:
    prompts = [np.arange(3, 3 + _PROMPT_TOKENS, dtype=np.int32) for _ in range(num_seqs)]
    executor.reset()
    plan = prefill_plan(prompts, _BLOCKS_EACH)
    params = SamplingParams.greedy(_WARM_UP + num_steps + 2)
    admissions = tuple(replace(each, sampling=params) for each in plan.admissions)
    assert executor.execute(replace(plan, admissions=admissions)).num_batched_tokens
    step_s: list[float] = []
    sums_s: list[float] = []
    for number in range(_WARM_UP + num_steps):
        before_s = 0.0 if reducer is None else reducer.seconds
        began_s = time.perf_counter()
        result = executor.execute(decode_plan(number + 2))
        assert len(result.handles) == num_seqs, "a sequence has ended"
        step_s.append(time.perf_counter() - began_s)
        sums_s.append(0.0 if reducer is None else reducer.seconds - before_s)
    return Times(num_seqs, _median_ms(step_s), _median_ms(sums_s))


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds[_WARM_UP:])


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--ranks", type=int, default=2, help="workers that share the model")
    parser.add_argument("--threads", type=int, default=2, help="threads of all workers together")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV cache")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="sequences")
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each size")
    parser.add_argument("--port", type=int, default=29_571, help="of the ranks' store")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
