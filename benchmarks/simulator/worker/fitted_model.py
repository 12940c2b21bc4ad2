"""A worker model fitted to a recording of a real engine."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.simulator.system import Work
from benchmarks.simulator.worker.beam_samples import BeamDraws
from benchmarks.simulator.worker.model_shapes import Model
from benchmarks.simulator.worker.plan_rows import Rows
from benchmarks.simulator.worker.worker_model import Parts
from scheduler_svc.core.step.plan_draft import AdmissionDraft, PlanDraft
from scheduler_svc.recording import EpochFrame, PlanFrame, read_frames
from shared.bus.api import EntryId
from shared.codec import decode, decode_as
from shared.errors import PageStreamError
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan

_FEWEST = 100  # steps to fit to


class TooShort(PageStreamError):
    """A recording has too few steps for a fit."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of a recording.

    Attributes:
        work: what it computed.
        duration_s: between the results of the step before and of this one; None if the engine was
            idle in between.
        begin_ms: wall clock time of planning.
    """

    work: Work
    duration_s: float | None
    begin_ms: int


class FittedWorker:
    """Durations as a sum of costs: of an iteration, of tokens, and of the tokens attended to.

    Args:
        model: of the engine.
        costs_s: of any iteration, of each prompt token, of each decoding sequence, and of each
            token that any of them attends to.
        kv_slots: of the engine.
    """

    def __init__(self, model: Model, costs_s: Sequence[float], kv_slots: int) -> None:
        self.model = model
        self._kv_slots = kv_slots
        self.costs_s = tuple(costs_s)

    @property
    def kv_slots(self) -> int:
        """Token slots, as given."""
        return self._kv_slots

    def seconds(self, work: Work) -> float:
        """The duration of an iteration."""
        return float(sum(np.multiply(self.costs_s, _features(work))))

    def parts(self, work: Work) -> Parts:
        """The duration, all as computing: the fit cannot tell its parts."""
        return Parts(compute_s=self.seconds(work))

    def swap_copies(self, num_blocks: int) -> int:
        """One copy for each block."""
        return num_blocks

    def recompute_us_per_token(self) -> float:
        """The cost of recomputing a token."""
        return 1e6 * self.costs_s[1]

    def swap_us_per_block(self, block_size: int) -> float:  # noqa: ARG002
        """Infinite: swapping was not measured, so it is never chosen."""
        return float("inf")


def fit(steps: list[TimedStep], model: Model, kv_slots: int) -> FittedWorker:
    """The costs that fit the durations best; none is negative.

    Raises:
        TooShort: there are too few steps.
    """
    timed = [step for step in steps if step.duration_s is not None]
    if len(timed) < _FEWEST:
        raise TooShort(f"{len(timed)} steps were timed, {_FEWEST} are needed to fit to")
    features = np.array([_features(step.work) for step in timed])
    durations = np.array([step.duration_s for step in timed], float)
    used = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, used], durations, rcond=None)
        if found.min() >= 0 or len(used) == 1:
            break
        used.pop(int(found.argmin()))  # a cost cannot be negative, so the worst is left out
    costs = [0.0] * features.shape[1]
    for column, cost in zip(used, found.tolist(), strict=True):
        costs[column] = max(cost, 0.0)
    return FittedWorker(model, costs, kv_slots)


def timed_steps(path: Path) -> list[TimedStep]:
    """All steps of a recording with one epoch, except the last two.

    With two plans in flight, plan k + 2 is made when the result of step k has come. Times are those
    of plans, in whole milliseconds: the errors average out over many steps.
    """
    plans = list(_plans(path))
    found = []
    rows = Rows(65_536, 0, 0, BeamDraws(np.random.default_rng(0)))
    for number, (plan, _) in enumerate(plans[:-2]):
        work = rows.begin(_draft(plan))
        rows.end(plan.step)
        (after, after_idle), (last, last_idle) = plans[number + 1 : number + 3]
        is_timed = not (after_idle or last_idle)
        duration_s = (last.now_ms - after.now_ms) / 1_000 if is_timed else None
        found.append(TimedStep(work, duration_s, plan.now_ms))
    return found


def _plans(path: Path) -> Iterator[tuple[StepPlan, bool]]:
    """Plans, and whether the engine could have been idle before each of them.

    A tick without a plan does not mean that: requests also arrive while the maximum of plans is in
    flight, and the steps in which they arrive take longer than others.
    """
    num_epochs, most_in_flight = 0, 0
    result_ids: list[EntryId] = []
    result_steps = [0]
    for frame in read_frames(path):
        if isinstance(frame, EpochFrame):
            num_epochs += 1
            if num_epochs > 1:
                raise TooShort(f"{path}: the engine started anew while it was measured")
            most_in_flight = frame.config.max_plans_in_flight
        elif isinstance(frame, PlanFrame):
            plan: StepPlan = decode_as(StepPlan, frame.plan)
            known = [
                result_steps[bisect_right(result_ids, EntryId.parse(turn.outputs_cursor))]
                for turn in plan.idle_turns
            ]
            yield plan, any(plan.step - 1 - step < most_in_flight for step in known)
        elif frame.log == "outputs":
            for message in map(decode, frame.entry.messages):
                if isinstance(message, StepResult):
                    result_ids.append(frame.entry.id)
                    result_steps.append(message.step)


def _draft(plan: StepPlan) -> PlanDraft:
    """The draft of a plan, as far as it determines the work."""
    draft = PlanDraft(plan.step)
    draft.retired = plan.retired.tolist()
    draft.admissions = [
        AdmissionDraft(
            found.handle,
            found.choice,
            len(found.tokens),
            found.num_prompt_tokens,
            found.num_computed,
            len(found.block_table),
            found.sampling,
        )
        for found in plan.admissions
    ]
    draft.fork_parents = plan.fork_parents.tolist()
    draft.fork_children = plan.fork_children.tolist()
    draft.fork_choices = plan.fork_choices.tolist()
    draft.chunk_handles = plan.chunk_handles.tolist()
    draft.chunk_tokens = plan.chunk_tokens.tolist()
    return draft


def _features(work: Work) -> tuple[float, float, float, float]:
    context = work.prefill_context + work.decode_context
    return 1.0, work.prefill_tokens, work.decode_tokens, context
