"""Frames of a pool in which much happens: the real scheduler core, with a worker that counts."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step.plan_draft import PlanDraft
from scheduler_svc.past.rerun import CountingWorker
from shared.bus.api import START, EntryId
from shared.engine_view.engine_view import EngineView
from shared.engine_view.frames import FrameSource
from shared.messages.endings import EndFlag, FinishReason
from shared.messages.outputs import RequestState, StepResult
from shared.messages.requests import Submit
from shared.outputs_log.events import Step
from shared.sampling import SamplingParams

_STEPS_PER_FRAME = 10  # 100 steps per second
_WARM_STEPS = 120  # until requests begin and end at all times
_BLOCK_SIZE = 16
_NOTHING = np.empty(0, np.int32)


@dataclass(slots=True)
class Costs:
    """Time that a reader of the logs needs, in ms.

    Attributes:
        frames: of each frame, with the plans and results in it.
    """

    frames: list[float]


class BusyEngine:
    """A pool that is full, of requests that end and begin all the time.

    Args:
        num_blocks: of the pool.
        num_sequences: that run at once.
    """

    def __init__(self, num_blocks: int, num_sequences: int, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_sequences = num_sequences
        each = num_blocks * _BLOCK_SIZE // num_sequences
        self._lengths = (each // 2, 3 * each // 2)
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            max_model_len=4 * each,
            max_num_sequences=num_sequences,
            max_num_batched_tokens=max(8_192, num_blocks * _BLOCK_SIZE // 40),
            max_plans_in_flight=1,
            num_watermark_blocks=num_blocks // 100,
            outputs_retention=100,
        )
        self._core = Scheduler(config)
        self._worker = CountingWorker()
        self._new_id = count(1).__next__
        numbers: dict[str, int] = {}
        number_of = lambda name: numbers.setdefault(name, len(numbers) + 1)  # noqa: E731
        self._view = EngineView(number_of, self._core.snapshot(), EntryId(1_000_000, 1))
        self._source = FrameSource()
        self._now_ms = 1_000_000
        self.costs = Costs([])

    def frames(self, num_frames: int) -> Iterator[str]:
        """The first is a snapshot of a pool that is full."""
        for _ in range(_WARM_STEPS):
            self._step()
        self._source.advance(self._view)
        yield self._source.snapshot()
        for _ in range(num_frames):
            spent_s = sum(self._step() for _ in range(_STEPS_PER_FRAME))
            began_s = time.perf_counter()
            frame = self._source.advance(self._view)
            self.costs.frames.append(1e3 * (time.perf_counter() - began_s + spent_s))
            if frame is not None:
                yield frame

    def _step(self) -> float:
        """One step; the seconds that the view needed for it."""
        self._submit()
        self._now_ms += 10
        draft = self._core.draft(self._now_ms)
        assert draft is not None, "requests always wait"
        plan = draft.finish(self._now_ms, START, START, START, [])
        sampled, ended, num_tokens = self._worker.execute(draft)
        result = self._apply(draft, sampled, ended, num_tokens)
        is_ended = set(ended)
        rows = {row: FinishReason.STOP for row, handle in enumerate(sampled) if handle in is_ended}
        began_s = time.perf_counter()
        self._view.plan(plan)
        self._view.apply(Step(result, sampled, result.tokens.tolist(), rows))
        return time.perf_counter() - began_s

    def _apply(
        self, draft: PlanDraft, sampled: list[int], ended: list[int], num_tokens: int
    ) -> StepResult:
        handles = np.array(sampled, np.int32)
        tokens = np.ones(len(sampled), np.int32)
        found = [(handle, EndFlag.STOP) for handle in ended]
        self._core.apply_result(draft.step, handles, tokens, found, ())
        self._core.take_events()
        nothing = _NOTHING
        return StepResult(
            *(draft.step, handles, tokens, nothing, nothing, (), (), ()),
            *(nothing, nothing, num_tokens, 9_000, 10_000),
        )

    def _submit(self) -> None:
        """Keep as many requests waiting as run."""
        least, most = self._lengths
        while self._core.num_requests < 2 * self._num_sequences:
            name = f"request{self._new_id()}"
            prompt = self._rng.integers(0, 30_000, self._rng.integers(least, most), np.int32)
            submit = Submit(
                request_id=name,
                gateway="",
                attachment="",
                prompt=prompt,
                sampling=SamplingParams.greedy(int(self._rng.integers(20, 200))),
                received_ms=0,
                num_choices=1,
                priority=0,
                cache_salt="",
            )
            for state in self._core.apply(submit, EntryId(self._now_ms, 0)):
                assert isinstance(state, RequestState), state
                target = submit.sampling.max_tokens
                self._worker.targets[state.choices[0].handle] = target
                self._view.apply(state)
