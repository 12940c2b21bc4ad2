"""Drives a worker's executor with the scheduler core in one loop: no processes, no bus."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np
import torch

from gpu_worker.step.begun_step import BegunStep
from gpu_worker.step.executor import Executor
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.codec import IntArray
from shared.errors import PageStreamError
from shared.messages.outputs import RequestState, StepResult
from shared.messages.plans import StepPlan
from shared.messages.requests import Submit
from shared.sampling import SamplingParams

_PLANS_IN_FLIGHT = 2


class RequestRefused(PageStreamError):
    """The scheduler refuses a request: the pool or the context is too small for it."""


@dataclass(frozen=True, slots=True)
class DrivenStep:
    """One executed step.

    Attributes:
        num_rows: sequences that got a token.
        only_decodes: no prompt was computed, and no sequence was admitted.
        num_context: tokens attended to, if all sequences decode.
        began_s: when planning began, after the step before.
        planned_s: when planning ended.
        ended_s: when the result was complete.
        model_s: of the forward pass, as the worker measures it.
    """

    num_rows: int
    only_decodes: bool
    num_context: int
    began_s: float
    planned_s: float
    ended_s: float
    model_s: float


@dataclass(frozen=True, slots=True)
class DrivenRun:
    """All steps of some requests that began together, and their outputs."""

    steps: tuple[DrivenStep, ...]
    outputs: tuple[tuple[int, ...], ...]  # tokens of each request

    @property
    def whole_s(self) -> float:
        """Seconds from the first plan to the last result."""
        return self.steps[-1].ended_s - self.steps[0].began_s


class DrivenWorker:
    """Generates tokens with a worker that never waits for a plan.

    Args:
        executor: of a worker.
        max_num_sequences: that run at once.
        max_num_batched_tokens: of a step.
    """

    def __init__(
        self, executor: Executor, max_num_sequences: int, max_num_batched_tokens: int
    ) -> None:
        kv = executor.limits.kv
        self._executor = executor
        self._config = SchedulerConfig(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            max_model_len=executor.limits.max_model_len,
            max_num_sequences=max_num_sequences,
            max_num_batched_tokens=max_num_batched_tokens,
            max_plans_in_flight=_PLANS_IN_FLIGHT,
            num_watermark_blocks=0,
            outputs_retention=10_000,
        )
        self._premapping = _premap_thread(executor)

    def close(self) -> None:
        """End the premapping thread; there must be no further run."""
        if self._premapping is not None:
            self._premapping.shutdown()

    def run(
        self, prompts: Sequence[IntArray], num_new: int, sampling: SamplingParams | None = None
    ) -> DrivenRun:
        """Generate ``num_new`` tokens for each prompt from an empty pool.

        Args:
            prompts: one for each request.
            num_new: tokens of each.
            sampling: how they are chosen; None: greedily.

        Raises:
            RequestRefused: a prompt is too long for the pool or the model.
        """
        core = Scheduler(self._config)
        ids = (EntryId(1, number) for number in count(1))
        sampling = replace(sampling or SamplingParams.greedy(num_new), max_tokens=num_new)
        requests = _submit(core, ids, prompts, sampling)
        self._executor.reset()
        plans: deque[StepPlan] = deque()
        steps: list[DrivenStep] = []
        results: list[StepResult] = []
        num_context = sum(map(len, prompts))
        under_way: deque[tuple[StepPlan, BegunStep]] = deque()
        while core.num_requests:
            began_s = time.perf_counter()
            while (next_plan := core.schedule(0)) is not None:
                plans.append(next_plan)
            planned_s = time.perf_counter()
            while plans and len(under_way) < _PLANS_IN_FLIGHT:
                under_way.append((plans[0], self._executor.begin(plans.popleft())))
            plan, begun = under_way.popleft()
            premapping = self._premap_next(plans)
            result = self._executor.finish(begun)
            ended_s = time.perf_counter()
            if premapping is not None:
                premapping.result()
            core.apply(result, next(ids))
            core.take_events()
            only_decodes = not (len(plan.chunk_handles) or plan.admissions)
            num_rows, model_s = len(result.handles), result.model_us / 1e6
            steps.append(
                DrivenStep(
                    num_rows, only_decodes, num_context, began_s, planned_s, ended_s, model_s
                )
            )
            results.append(result)
            num_context += num_rows
        return DrivenRun(tuple(steps), _outputs(results, requests))

    def _premap_next(self, plans: deque[StepPlan]) -> "Future[None] | None":
        """Premap the next plan while the present one is executed."""
        if self._premapping is None or not plans:
            return None
        return self._premapping.submit(self._executor.premap, plans[0])


def steady_steps(
    steps: Sequence[DrivenStep], num_sequences: int, num_warm_up: int, most: int
) -> list[tuple[DrivenStep, DrivenStep]]:
    """Pairs of consecutive steps in which all sequences decode and nothing else happens.

    Args:
        num_warm_up: pairs to skip at the beginning.
        most: pairs to return, at most.
    """
    found = [
        (before, step)
        for before, step in pairwise(steps)
        if all(each.num_rows == num_sequences and each.only_decodes for each in (before, step))
    ]
    return found[num_warm_up : num_warm_up + most]


def _submit(
    core: Scheduler, ids: Iterator[EntryId], prompts: Sequence[IntArray], sampling: SamplingParams
) -> dict[int, int]:
    """Submit prompts; their indices by the handles of their requests."""
    found: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        submit = Submit(f"r{number}", "benchmark", "a", prompt, sampling, 0, 1, 0, "")
        for answer in core.apply(submit, next(ids)):
            if not isinstance(answer, RequestState):
                new = sampling.max_tokens
                raise RequestRefused(f"{len(prompt)} tokens and {new} new: {answer}")
            found[answer.choices[0].handle] = number
    return found


def _outputs(
    results: Sequence[StepResult], requests: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in requests]
    for result in results:
        for handle, token in zip(result.handles.tolist(), result.tokens.tolist(), strict=True):
            found[requests[handle]].append(token)
    return tuple(map(tuple, found))


def _premap_thread(executor: Executor) -> ThreadPoolExecutor | None:
    """A thread for premapping; None if this memory maps no blocks."""
    if executor.memory.mapping is None:
        return None

    def enter() -> None:
        if executor.device.type == "cuda":
            torch.cuda.set_device(executor.device)

    return ThreadPoolExecutor(1, "premap", enter)


def random_prompts(num_prompts: int, num_tokens: int, vocabulary: int, seed: int) -> list[IntArray]:
    """Prompts that have no prefix in common."""
    rng = np.random.default_rng((num_prompts, num_tokens, seed))
    return list(rng.integers(1, vocabulary, (num_prompts, num_tokens)).astype(np.int32))
