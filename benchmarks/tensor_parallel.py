"""Times steps of one worker on all threads, and of several ranks that share the threads.

    python -m benchmarks.tensor_parallel MODEL [--ranks 2] [--threads 2] [--dtype bfloat16]

The ranks are processes of this machine, as under scripts/serve; there is no bus and no gateway. A
step is a decode of so many sequences, or a prompt in one chunk. *In sums* includes waiting for the
slower rank; *sums alone* are as many sums of the same size with no computing between them.
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

from gpu_worker.ranks.collectives import Collectives, TorchCollectives
from gpu_worker.ranks.member import Member
from gpu_worker.ranks.ranked_executor import RankedExecutor
from gpu_worker.ranks.ranks import Ranks
from gpu_worker.ranks.shared_memory import share_memory
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from gpu_worker.startup.warm_up_plans import decode_plan, prefill_plan
from gpu_worker.step.plan_executor import PlanExecutor
from shared.messages.plans import StepPlan
from shared.sampling import SamplingParams

_HOST = "127.0.0.1"
_SHORT_PROMPT = 16
_BLOCK_SIZE = 16
_WARM_UP = 10
_NUM_SUMS = 200


@dataclass(frozen=True, slots=True)
class Job:
    """A rank's part of the measurement; one rank is a worker alone.

    Attributes:
        prompt: tokens of the prompt whose step is timed.
        batches: sequences that decode together, one case each.
        num_steps: that are timed in each case.
        shares_memory: whether sums go through shared memory, as under scripts/serve; else gloo.
    """

    model: str
    dtype: str
    num_ranks: int
    rank: int
    num_threads: int
    port: int
    prompt: int
    batches: tuple[int, ...]
    num_steps: int
    shares_memory: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step, or the medians of several, and its collectives.

    Attributes:
        step_ms: of all of it.
        sums_ms: in its sums, with the waiting for other ranks.
        compared_ms: in the exchange before it, likewise.
        num_sums: of partial outputs.
        sum_bytes: that a rank gives into them.
    """

    step_ms: float
    sums_ms: float
    compared_ms: float
    num_sums: int
    sum_bytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """What the steps of a case took.

    Attributes:
        case: what a step computes.
        num_tokens: likewise.
        step: medians.
        alone_ms: as many sums of this size, when no rank computes anything.
    """

    case: str
    num_tokens: int
    step: Step
    alone_ms: float


class TimedGathers:
    """Collectives that measure their exchanges of numbers.

    Attributes:
        gathers_s: seconds in them so far.
    """

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.gathers_s = 0.0

    @property
    def member(self) -> Member:
        """This rank and its group."""
        return self._inner.member

    def sum(self, x: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        self._inner.sum(x)

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace a tensor by that of rank 0."""
        self._inner.broadcast(x)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank."""
        began_s = time.perf_counter()
        found = self._inner.gather(numbers)
        self.gathers_s += time.perf_counter() - began_s
        return found

    def set_deadline(self, seconds: float) -> None:
        """The longest time that a call may take."""
        self._inner.set_deadline(seconds)

    def close(self) -> None:
        """Leave the group."""
        self._inner.close()


def main() -> int:
    """Measure and print a table."""
    options = _parsed()
    print(f"{options.model}, {options.dtype}, {options.threads} threads in all")
    print("| step | ranks x threads | step ms | in sums | before it | sums | KiB | sums alone |")
    print("|---|---|" + "---:|" * 6)
    for num_ranks in (1, options.ranks):
        threads = max(1, options.threads // num_ranks)
        job = Job(
            options.model,
            options.dtype,
            num_ranks,
            0,
            threads,
            options.port,
            options.prompt,
            tuple(options.batches),
            options.steps,
            not options.gloo,
        )
        jobs = [replace(job, rank=rank) for rank in range(num_ranks)]
        with ProcessPoolExecutor(num_ranks, mp_context=get_context("spawn")) as pool:
            found, weights = next(iter(pool.map(measure, jobs)))
        for each in found:
            step = each.step
            print(
                f"| {each.case} | {num_ranks} x {threads} | {step.step_ms:.2f} | "
                f"{step.sums_ms:.2f} | {step.compared_ms:.2f} | {step.num_sums} | "
                f"{step.sum_bytes / 1024:.0f} | {each.alone_ms:.2f} |",
                flush=True,
            )
        print(f"weights of rank 0: {weights / 2**20:.0f} MiB")
    return 0


def measure(job: Job) -> tuple[list[Times], int]:
    """Times of a rank, and the bytes of its weights."""
    longest = max(job.prompt, _SHORT_PROMPT + _WARM_UP + job.num_steps) + 2
    settings = WorkerSettings(
        model=job.model,
        dtype=job.dtype,
        device="cpu",
        num_threads=job.num_threads,
        num_blocks=max(job.batches) * _num_blocks(longest),
        block_size=_BLOCK_SIZE,
        max_model_len=longest,
        max_num_batched_tokens=max(512, job.prompt, max(job.batches) * _SHORT_PROMPT),
        num_host_blocks=0,
        tensor_parallel_size=job.num_ranks,
        rank=job.rank,
    )
    ranks = None if job.num_ranks == 1 else _connected(job)
    worker = build_worker(settings, ranks=ranks)
    executor: PlanExecutor = worker.executor
    timed = None
    if ranks is not None:
        timed = TimedGathers(ranks.collectives)
        executor = RankedExecutor(worker.executor, timed, ranks.failure)
    steps = _Steps(executor, ranks, timed, longest)
    found = [steps.decodes(num_seqs, job.num_steps) for num_seqs in job.batches]
    found.append(steps.prompts(job.prompt, job.num_steps // 5))
    return found, worker.weight_bytes


def _connected(job: Job) -> Ranks:
    store = TCPStore(
        _HOST, job.port, job.num_ranks, is_master=job.rank == 0, wait_for_workers=False
    )
    member, device = Member(job.rank, job.num_ranks, "benchmark"), torch.device("cpu")
    collectives: Collectives = TorchCollectives(member, store, _HOST, device)
    return Ranks.of(share_memory(collectives) if job.shares_memory else collectives, device)


class _Steps:
    """Executes steps, and takes what they and their collectives took.

    Args:
        executor: of a worker.
        ranks: of its group; None: it is alone.
        timed: the executor's collectives; None: likewise.
        longest: tokens of a sequence, at most.
    """

    def __init__(
        self,
        executor: PlanExecutor,
        ranks: Ranks | None,
        timed: TimedGathers | None,
        longest: int,
    ) -> None:
        self._executor = executor
        self._ranks = ranks
        self._timed = timed
        self._longest = longest

    def decodes(self, num_seqs: int, num_steps: int) -> Times:
        """Decode steps of so many sequences."""
        self._step(self._prompts(num_seqs, _SHORT_PROMPT))
        plans = (decode_plan(number + 2) for number in range(_WARM_UP + num_steps))
        found = [self._step(plan) for plan in plans]
        return self._times(f"decode, {num_seqs}", num_seqs, found[_WARM_UP:])

    def prompts(self, num_tokens: int, num_steps: int) -> Times:
        """Steps that compute a prompt each."""
        found = [self._step(self._prompts(1, num_tokens)) for _ in range(2 + num_steps)]
        return self._times(f"prompt, {num_tokens}", num_tokens, found[2:])

    def _prompts(self, num_seqs: int, num_tokens: int) -> StepPlan:
        """The first plan of an epoch."""
        self._executor.reset()
        prompts = [np.arange(3, 3 + num_tokens, dtype=np.int32) for _ in range(num_seqs)]
        plan = prefill_plan(prompts, _num_blocks(self._longest))
        params = SamplingParams.greedy(self._longest - num_tokens)
        return replace(
            plan, admissions=tuple(replace(each, sampling=params) for each in plan.admissions)
        )

    def _step(self, plan: StepPlan) -> Step:
        before = self._so_far()
        began_s = time.perf_counter()
        result = self._executor.execute(plan)
        step_s = time.perf_counter() - began_s
        assert len(result.handles), "every sequence has ended"
        pairs = zip(before, self._so_far(), strict=True)
        sums_s, num_sums, sum_bytes, gathers_s = (after - before for before, after in pairs)
        return Step(1e3 * step_s, 1e3 * sums_s, 1e3 * gathers_s, int(num_sums), int(sum_bytes))

    def _times(self, case: str, num_tokens: int, steps: Sequence[Step]) -> Times:
        medians = Step(
            statistics.median(each.step_ms for each in steps),
            statistics.median(each.sums_ms for each in steps),
            statistics.median(each.compared_ms for each in steps),
            steps[-1].num_sums,
            steps[-1].sum_bytes,
        )
        return Times(case, num_tokens, medians, self._sums_alone_ms(medians))

    def _sums_alone_ms(self, step: Step) -> float:
        if self._ranks is None:
            return 0.0
        x = torch.zeros(step.sum_bytes // step.num_sums // 4)
        seconds = []
        for _ in range(_NUM_SUMS):
            began_s = time.perf_counter()
            self._ranks.reducer.sum(x, x.dtype)
            seconds.append(time.perf_counter() - began_s)
        return 1e3 * statistics.median(seconds) * step.num_sums

    def _so_far(self) -> tuple[float, int, int, float]:
        if self._ranks is None or self._timed is None:
            return 0.0, 0, 0, 0.0
        totals = self._ranks.reducer.totals
        assert totals is not None
        return totals.seconds, totals.count, totals.num_bytes, self._timed.gathers_s


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--ranks", type=int, default=2, help="workers that share the model")
    parser.add_argument("--threads", type=int, default=2, help="threads of all workers together")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV cache")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="sequences")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each size")
    parser.add_argument("--gloo", action="store_true", help="sums as between machines")
    parser.add_argument("--port", type=int, default=29_571, help="of the ranks' store")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
