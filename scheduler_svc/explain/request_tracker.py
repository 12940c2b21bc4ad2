"""Follows one request through the logs and writes its timeline. Pure.

A plan has the preemptions that it makes, and why. Where plans are gone, results show them: a
running sequence has a row in every result, so a missing row is a preemption; and an admission has
the number of tokens that were still in the pool.
"""

import numpy as np

from scheduler_svc.core.config import Preemption
from scheduler_svc.explain.load_view import LoadView
from scheduler_svc.explain.timeline import Kind, Timeline, When, asked_for, counted, listed, size_of
from scheduler_svc.explain.tracked_request import (
    STATUS,
    Phase,
    TrackedChoice,
    TrackedRequest,
)
from shared.engine_view.marks import words_of_preemption
from shared.messages.endings import FinishReason
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState
from shared.messages.plans import EpochStarted, PlannedPreemption, StepPlan
from shared.outputs_log.events import Damaged, Gap, OutputsEvent, Step

_BY_UNKNOWN = "by whom its plan would tell, which has been trimmed"

_P = Phase


class RequestTracker:
    """Follows one request through plans and the events of ``outputs``.

    Args:
        timeline: the events are added to it.
        block_size: of the pool, if known; it distinguishes swapped tokens from cached ones.
    """

    def __init__(self, timeline: Timeline, block_size: int | None) -> None:
        self.request = TrackedRequest(block_size)
        self._timeline = timeline
        self._request_id = timeline.request_id
        self._load = LoadView()
        self._num_rounds = 0  # of a beam search
        self._parties: tuple[str, tuple[str, ...]] | None = None
        self._is_new_epoch = False  # since the last RequestState
        self._waits_since_ms = 0
        self._admitted_step = 0
        self._planned: tuple[int, When] | None = None  # the last step whose plan is left
        self._was_admitted = False
        self._kind_unknown = False  # of the last preemption

    def close(self) -> None:
        """End the timeline with the status at the end of the logs."""
        tokens = listed([str(n) for n in self.request.num_tokens.values()])
        told = (
            f", {tokens} tokens generated"
            if self.request.choices and not self.request.is_search
            else ""
        )
        if self.request.is_search:
            told = f", {counted(self._num_rounds, 'round')} of beam search seen"
        self._timeline.status = STATUS[self.request.phase] + told

    def apply(self, event: OutputsEvent, when: When) -> None:
        """Take the next event of ``outputs``, of any request."""
        match event:
            case Step():
                self._on_step(event, when)
            case RequestState():
                self._on_state(event, when)
            case ChoiceEnded():
                self._on_choice_ended(event, when)
            case RequestEnded():
                self._on_request_ended(event, when)
            case BeamsEnded():
                self._on_beams_ended(event, when)
            case EpochStarted():
                self._on_epoch(event, when)
            case Gap(missing_steps=(first, end)):
                self._on_gap(f"steps {first} to {end - 1} are missing", when)
            case Gap():
                self._on_gap(event.why, when)
            case Damaged():
                self._on_gap(event.error, when)

    # ------------------------------------------------------------------ states

    def _on_state(self, state: RequestState, when: When) -> None:
        self._load.stated(state)
        if state.submit.request_id != self._request_id:
            return
        choices = {
            c.choice: TrackedChoice(c.handle, len(c.output), c.finish_reason) for c in state.choices
        }
        submit = state.submit.with_prompt_of(self.request.submit) or state.submit
        is_search = submit.sampling.beams is not None
        old, self.request.choices = self.request.choices, {} if is_search else choices
        if is_search and (running := [c for c in state.choices if not c.finish_reason]):
            lengths = {"beam": len(running[0].output)}
            self.request.choices = {0: TrackedChoice(running[0].handle, len(running[0].output))}
        else:
            lengths = {str(number): found.num_tokens for number, found in choices.items()}
        self._add_state(state, old, lengths, when)
        self.request.submit, self._is_new_epoch = submit, False

    def _add_state(
        self,
        state: RequestState,
        old: dict[int, TrackedChoice],
        lengths: dict[str, int],
        when: When,
    ) -> None:
        submit = state.submit
        moved = self.request.phase is not _P.UNSEEN and submit.attachment != self.request.attachment
        facts = {"gateway": submit.gateway, "num_tokens": lengths}
        has = listed([str(length) for length in lengths.values()])
        if not self.request.handles():
            text = f"how it ended is restated for gateway {submit.gateway}"
            self._timeline.add(Kind.TOLD_AGAIN, when, text, **facts)
            self.request.phase = _P.ENDED
            return
        if self.request.phase is _P.UNSEEN:
            self._accepted(state, lengths, when)
        elif self.request.phase is _P.ENDED:
            self._wait(when)
            text = f"goes on after all, with {has} tokens, for gateway {submit.gateway}"
            self._timeline.add(Kind.ACCEPTED, when, text, **facts)
        elif self._is_new_epoch:
            deaths = state.num_deaths
            died = f"; {counted(deaths, 'worker')} died computing it" if deaths else ""
            queue = self._load.queue_in_words(self._request_id)
            text = f"taken over with {has} tokens generated{died}{queue}"
            self._timeline.add(Kind.TAKEN_OVER, when, text, num_deaths=deaths, **facts)
            self._wait(when)
        elif self.request.has_fresh_handles(old):
            had = listed([str(found.num_tokens) for found in old.values()])
            text = f"goes on from the {has} tokens that its client has; the log had {had}"
            before = {str(number): found.num_tokens for number, found in old.items()}
            self._timeline.add(Kind.REWOUND, when, text, num_tokens_before=before, **facts)
            self._wait(when)
        if moved:
            same = (
                "again by the same gateway" if submit.gateway == self.request.gateway else "now by"
            )
            text = f"delivered {same} {submit.gateway}, from {has} tokens on"
            self._timeline.add(Kind.MOVED, when, text, attachment=submit.attachment, **facts)

    def _accepted(self, state: RequestState, lengths: dict[str, int], when: When) -> None:
        submit = state.submit
        facts = {"gateway": submit.gateway, "num_tokens": lengths}
        if not self._timeline.events:
            text = f"received by a gateway: {asked_for(submit)}"
            self._timeline.add(Kind.SUBMITTED, When(submit.received_ms), text, **size_of(submit))
            self._timeline.note_unknown("its Submit, which has been trimmed from requests")
        if any(lengths.values()):
            has = listed([str(length) for length in lengths.values()])
            text = f"it has {has} tokens generated where it is first seen"
            self._timeline.add(Kind.SEEN, when, text, **facts)
            self._timeline.note_unknown("what was before it is first seen in outputs")
        else:
            ahead, running = self._load.ahead_of(self._request_id), self._load.running()
            text = f"accepted{self._load.queue_in_words(self._request_id)}"
            self._timeline.add(Kind.ACCEPTED, when, text, waiting=ahead, running=running, **facts)
        self._wait(when)

    def _wait(self, when: When) -> None:
        self.request.phase = _P.WAITING
        self._waits_since_ms = when.at_ms
        self._kind_unknown = False

    # ------------------------------------------------------------------- steps

    def plan(self, plan: StepPlan) -> None:
        """Take the plan whose result comes next."""
        # Plans in flight are made before the results that come before theirs are known.
        events = self._timeline.events
        when = When(max(plan.now_ms, events[-1].when.at_ms if events else 0))
        self._planned = (plan.step, When(plan.now_ms))
        for preemption in plan.preemptions:
            if preemption.request_id == self._request_id:
                self._preempted(preemption, plan.step, when)

    def _preempted(self, found: PlannedPreemption, step: int, when: When) -> None:
        by = "itself" if found.by == self._request_id else found.by
        why = words_of_preemption(found, "this request", found.by)
        late = "; its end was known only afterwards" if self.request.phase is _P.ENDED else ""
        text = f"preempted by {by} in step {step} ({found.kind}): it {why}"
        self._timeline.add(
            Kind.PREEMPTED,
            when,
            text + late,
            step=step,
            by=[found.by],
            preemption=found.kind,
            num_tokens=found.num_tokens,
            num_blocks=found.num_blocks,
            num_free_blocks=found.num_free_blocks,
            num_free_host_blocks=found.num_free_host_blocks,
        )
        if self.request.is_open:
            self._wait(when)
            self.request.phase = _P.PREEMPTED

    def _missing_row(self, step: int, when: When) -> None:
        """Add a preemption that follows from a missing row: its plan is gone."""
        num_tokens = self.request.num_tokens_in_all()
        text = f"preempted in step {step} with {num_tokens} tokens, {_BY_UNKNOWN}"
        facts = {"step": step, "by": None, "preemption": None, "num_tokens": num_tokens}
        self._timeline.add(Kind.PREEMPTED, when, text, **facts)
        self._wait(when)
        self.request.phase = _P.PREEMPTED
        self._kind_unknown = True

    def _on_step(self, step: Step, when: When) -> None:
        if self.request.is_open:
            if self.request.is_search and not self._has_plan(step.result.step):
                what = "preemptions of a beam search in steps whose plans are gone"
                self._timeline.note_unknown(what)
            self._follow(step, when)
        self._load.computed(step)

    def _follow(self, step: Step, when: When) -> None:
        result, mine = step.result, self.request.handles()
        admitted = np.isin(result.admitted_handles, mine)
        if admitted.any():
            computed = result.admitted_computed[admitted].tolist()
            self._admitted(result.admitted_handles[admitted].tolist(), computed, result.step, when)
        if self.request.is_search:
            if any(found.group in mine for found in result.beams):
                self._num_rounds += 1
                self._sampled(result.step, when)
            return
        rows = [row for row, handle in enumerate(step.handles) if handle in mine]
        if rows:
            self._sampled(result.step, when)
        elif self.request.phase is _P.RUNNING:
            self._missing_row(result.step, When(when.at_ms, True))
        by_handle = {c.handle: n for n, c in self.request.choices.items() if not c.finish_reason}
        for row in rows:
            self.request.choices[by_handle[step.handles[row]]].num_tokens += 1
        for row in rows:
            if row in step.ends:
                self._end_choice(by_handle[step.handles[row]], step.ends[row], when)

    def _has_plan(self, step: int) -> bool:
        return self._planned is not None and self._planned[0] == step

    def _admitted(self, handles: list[int], computed: list[int], step: int, when: When) -> None:
        if self._planned is not None and self._has_plan(step):
            when = When(max(self._planned[1].at_ms, self._waits_since_ms))
        total, reused = self.request.num_tokens_of(handles), sum(computed)
        waited_ms = max(0, when.at_ms - self._waits_since_ms)
        facts = {"step": step, "waited_ms": waited_ms, "num_tokens": total, "num_reused": reused}
        after = f"in step {step} after {waited_ms / 1e3:.3f} s"
        if not self._was_admitted and not self.request.has_output:
            text = f"admitted {after}; {reused} of {total} tokens come from the prefix cache"
            self._timeline.add(Kind.ADMITTED, when, text, **facts)
        else:
            if self.request.phase is _P.PREFILLING:
                self._timeline.add(
                    Kind.PREEMPTED,
                    When(when.at_ms, True),
                    f"preempted while it was computed, between steps {self._admitted_step} and "
                    f"{step}; {_BY_UNKNOWN}",
                    step=None,
                    by=None,
                    preemption=Preemption.RECOMPUTE.value,
                    num_tokens=None,
                )
            kind = self.request.kind_of_return(handles, computed) if self._kind_unknown else None
            how = f"; {kind}" if kind else ""
            text = f"admitted again {after}; {reused} of {total} tokens were still there, "
            text += f"{total - reused} are computed again{how}"
            self._timeline.add(Kind.ADMITTED_AGAIN, when, text, **facts)
        self.request.phase, self._admitted_step = _P.PREFILLING, step
        self._was_admitted, self._kind_unknown = True, False

    def _sampled(self, step: int, when: When) -> None:
        """A step gave the request a token."""
        if self.request.phase is _P.RUNNING:
            return
        took = step - self._admitted_step + 1 if self.request.phase is _P.PREFILLING else None
        steps = "" if took is None else f"; computed in {counted(took, 'step')}"
        if not self.request.has_output and self._num_rounds <= 1:
            text = f"first token in step {step}{steps}"
            self._timeline.add(Kind.FIRST_TOKEN, when, text, step=step, num_prefill_steps=took)
        elif self.request.phase is _P.PREFILLING:
            text = f"goes on in step {step}{steps}"
            self._timeline.add(Kind.RESUMED, when, text, step=step, num_prefill_steps=took)
        self.request.phase = _P.RUNNING

    # ----------------------------------------------------------------- endings

    def _on_choice_ended(self, message: ChoiceEnded, when: When) -> None:
        self._load.choice_ended(message.request_id, message.choice)
        if message.request_id == self._request_id and message.choice in self.request.choices:
            self._end_choice(message.choice, message.reason, when)

    def _end_choice(self, number: int, reason: str, when: When) -> None:
        choice = self.request.choices[number]
        if choice.finish_reason:
            return
        choice.finish_reason = str(reason)
        if len(self.request.choices) > 1:
            text = f"choice {number} ended after {counted(choice.num_tokens, 'token')}: {reason}"
            facts = {"choice": number, "reason": str(reason), "num_tokens": choice.num_tokens}
            self._timeline.add(Kind.CHOICE_ENDED, when, text, **facts)
        if all(found.finish_reason for found in self.request.choices.values()):
            self._end(str(reason), "", list(self.request.num_tokens.values()), when)

    def _on_request_ended(self, message: RequestEnded, when: When) -> None:
        self._load.ended(message.request_id)
        if message.request_id == self._request_id:
            lengths = [] if self.request.is_search else list(self.request.num_tokens.values())
            self._end(message.reason, message.error, lengths, when)

    def _on_beams_ended(self, message: BeamsEnded, when: When) -> None:
        self._load.ended(message.request_id)
        if message.request_id == self._request_id:
            lengths = [len(found.tokens) for found in message.hypotheses]
            self._end(FinishReason.STOP, "", lengths, when)

    def _end(self, reason: str, error: str, lengths: list[int], when: When) -> None:
        if self.request.phase is _P.ENDED:
            text = f"its end was said again: {reason}"
            self._timeline.add(Kind.TOLD_AGAIN, when, text, reason=str(reason))
            return
        after = f" after {listed([str(length) for length in lengths])} tokens" if lengths else ""
        why = f" ({error})" if error else ""
        text = f"ended{after}: {reason}{why}"
        self._timeline.add(
            Kind.ENDED, when, text, reason=str(reason), error=error, num_tokens=lengths
        )
        self.request.phase = _P.ENDED

    # ------------------------------------------------------------------ epochs

    def _on_epoch(self, started: EpochStarted, when: When) -> None:
        parties = (started.scheduler, started.workers)
        if self.request.is_open:
            suspect = bool(np.isin(started.suspects, self.request.handles()).any())
            why = _why_new(self._parties, parties)
            while_computed = "; it was being computed" if suspect else ""
            text = f"epoch {started.epoch} begins: {why}{while_computed}"
            facts = {"epoch": started.epoch, "scheduler": started.scheduler}
            self._timeline.add(
                Kind.EPOCH, when, text, workers=list(started.workers), suspect=suspect, **facts
            )
        self._parties = parties if any(parties) else None
        self._load.drop_handles()
        self.request.drop_handles()
        self._is_new_epoch, self._planned = True, None

    def _on_gap(self, why: str, when: When) -> None:
        if self.request.is_open and self.request.handles():
            self._timeline.add(Kind.LOST_SIGHT, when, f"lost from sight: {why}")
            self._timeline.note_unknown(f"what the missing entries of outputs said: {why}")
        self._load.drop_handles()
        self.request.drop_handles()


def _why_new(before: tuple[str, tuple[str, ...]] | None, now: tuple[str, tuple[str, ...]]) -> str:
    """What is different in an epoch's parties."""
    if before is None or not any(now):
        return "who has changed is not known"
    changed = []
    if before[0] != now[0]:
        changed.append(f"scheduler {now[0]} in place of {before[0]}")
    if before[1] != now[1]:
        changed.append(f"worker {', '.join(now[1])} in place of {', '.join(before[1])}")
    return " and ".join(changed) or "the same scheduler and worker start over"
