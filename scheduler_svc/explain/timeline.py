"""One request's way through the logs: messages in, a story out. Pure.

Results say more than they seem to: a running sequence has a row in every one, so a missing row
is a preemption; and an admission says how much of the sequence was still there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from scheduler_svc.core.config import Preemption
from scheduler_svc.core.events import Preempted
from scheduler_svc.explain.load_view import Crowd
from scheduler_svc.explain.story import Kind, Story, When, asked_for, counted, listed, size_of
from shared.messages.endings import EndFlag, FinishReason
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Submit

_BY_UNKNOWN = "by whom its plan would tell, which has been trimmed"
UNNAMED = "one with handles that only plans name"


class Phase(Enum):
    """Where the request is, as far as the logs tell."""

    UNSEEN = auto()
    WAITING = auto()
    PREFILLING = auto()  # it has blocks and no row in a result yet
    RUNNING = auto()  # it has a row in every result
    PREEMPTED = auto()
    ENDED = auto()


_P = Phase
_HAS_BLOCKS = frozenset({_P.PREFILLING, _P.RUNNING})
_STATUS = {
    _P.UNSEEN: "no scheduler has answered yet",
    _P.WAITING: "it waits for its turn",
    _P.PREFILLING: "its tokens are being computed",
    _P.RUNNING: "it is running",
    _P.PREEMPTED: "it waits to get its blocks back",
    _P.ENDED: "it has ended",
}


@dataclass(slots=True)
class _Choice:
    handle: int
    num_tokens: int
    finish_reason: str = ""


class Chronicle:
    """Follows one request.

    Args:
        story: where to tell it.
        block_size: of the pool, if known; tells swapped tokens from cached ones.
    """

    def __init__(self, story: Story, block_size: int | None) -> None:
        self.phase = Phase.UNSEEN
        self.submit: Submit | None = None
        self._story = story
        self._request_id = story.request_id
        self._block_size = block_size
        self._crowd = Crowd()
        self._choices: dict[int, _Choice] = {}
        self._num_rounds = 0  # of a beam search
        self._parties: tuple[str, tuple[str, ...]] | None = None
        self._is_new_epoch = False  # since the last RequestState
        self._last_step: int | None = None
        self._waits_since_ms = 0
        self._admitted_step = 0
        self._planned: tuple[int, When] | None = None  # the last step whose plan is left
        self._was_admitted = False
        self._kind_unknown = False  # of the last preemption

    @property
    def gateway(self) -> str:
        """That delivers the request; empty if that is not known yet."""
        return "" if self.submit is None else self.submit.gateway

    @property
    def attachment(self) -> str:
        """Of that delivery; empty if that is not known yet."""
        return "" if self.submit is None else self.submit.attachment

    @property
    def num_tokens(self) -> dict[int, int]:
        """Generated tokens by choice."""
        return {number: choice.num_tokens for number, choice in self._choices.items()}

    def close(self, is_replayed: bool) -> None:
        """The logs end here.

        Args:
            is_replayed: whether all preemptions were noted.
        """
        if self._is_search and not is_replayed:
            self._story.admit_ignorance("preemptions of a beam search: results do not show them")
        tokens = listed([str(n) for n in self.num_tokens.values()])
        told = f", {tokens} tokens generated" if self._choices and not self._is_search else ""
        if self._is_search:
            told = f", {counted(self._num_rounds, 'round')} of beam search seen"
        self._story.status = _STATUS[self.phase] + told

    # ------------------------------------------------------------------ states

    def state(self, state: RequestState, when: When) -> None:
        """A RequestState of anybody."""
        self._crowd.stated(state)
        if state.submit.request_id != self._request_id:
            return
        choices = {
            c.choice: _Choice(c.handle, len(c.output), c.finish_reason) for c in state.choices
        }
        submit = state.submit.with_prompt_of(self.submit) or state.submit
        is_search = submit.sampling.beams is not None
        old, self._choices = self._choices, {} if is_search else choices
        if is_search and (running := [c for c in state.choices if not c.finish_reason]):
            lengths = {"beam": len(running[0].output)}
            self._choices = {0: _Choice(running[0].handle, len(running[0].output))}
        else:
            lengths = {str(number): found.num_tokens for number, found in choices.items()}
        self._tell_state(state, old, lengths, when)
        self.submit, self._is_new_epoch = submit, False

    def _tell_state(
        self, state: RequestState, old: dict[int, _Choice], lengths: dict[str, int], when: When
    ) -> None:
        submit = state.submit
        moved = self.phase is not _P.UNSEEN and submit.attachment != self.attachment
        facts = {"gateway": submit.gateway, "num_tokens": lengths}
        has = listed([str(length) for length in lengths.values()])
        if not self._handles():
            text = f"how it ended is told to gateway {submit.gateway}"
            self._story.tell(Kind.TOLD_AGAIN, when, text, **facts)
            self.phase = _P.ENDED
            return
        if self.phase is _P.UNSEEN:
            self._accepted(state, lengths, when)
        elif self.phase is _P.ENDED:
            self._wait(when)
            text = f"goes on after all, with {has} tokens, for gateway {submit.gateway}"
            self._story.tell(Kind.ACCEPTED, when, text, **facts)
        elif self._is_new_epoch:
            deaths = state.num_deaths
            died = f"; {counted(deaths, 'worker')} died computing it" if deaths else ""
            text = f"taken over with {has} tokens generated{died}{self._queue()}"
            self._story.tell(Kind.TAKEN_OVER, when, text, num_deaths=deaths, **facts)
            self._wait(when)
        elif self._has_fresh_handles(old):
            had = listed([str(found.num_tokens) for found in old.values()])
            text = f"goes on from the {has} tokens that its client has; the log had {had}"
            before = {str(number): found.num_tokens for number, found in old.items()}
            self._story.tell(Kind.REWOUND, when, text, num_tokens_before=before, **facts)
            self._wait(when)
        if moved:
            same = "again by the same gateway" if submit.gateway == self.gateway else "now by"
            text = f"delivered {same} {submit.gateway}, from {has} tokens on"
            self._story.tell(Kind.MOVED, when, text, attachment=submit.attachment, **facts)

    def _has_fresh_handles(self, old: dict[int, _Choice]) -> bool:
        """Whether the log speaks of the choices under new handles, though it knew the old ones."""
        known = {number: found.handle for number, found in old.items() if found.handle}
        return bool(known) and any(
            known.get(number) != found.handle
            for number, found in self._choices.items()
            if not found.finish_reason
        )

    def _accepted(self, state: RequestState, lengths: dict[str, int], when: When) -> None:
        submit = state.submit
        facts = {"gateway": submit.gateway, "num_tokens": lengths}
        if not self._story.events:
            text = f"received by a gateway: {asked_for(submit)}"
            self._story.tell(Kind.SUBMITTED, When(submit.received_ms), text, **size_of(submit))
            self._story.admit_ignorance("its Submit, which has been trimmed from requests")
        if any(lengths.values()):
            has = listed([str(length) for length in lengths.values()])
            text = f"it has {has} tokens generated where it is first seen"
            self._story.tell(Kind.SEEN, when, text, **facts)
            self._story.admit_ignorance("what was before it is first seen in outputs")
        else:
            ahead, running = self._crowd.ahead_of(self._request_id), self._crowd.running()
            text = f"accepted{self._queue()}"
            self._story.tell(Kind.ACCEPTED, when, text, waiting=ahead, running=running, **facts)
        self._wait(when)

    def _queue(self) -> str:
        """Who is served first, in words."""
        ahead, running = self._crowd.ahead_of(self._request_id), self._crowd.running()
        if not ahead and not running:
            return "; nobody is ahead of it"
        waiting = f"behind {len(ahead)} that wait ({listed(ahead)})" if ahead else ""
        busy = f"beside {len(running)} that run ({listed(running)})" if running else ""
        return "; " + ", ".join(part for part in (waiting, busy) if part)

    def _wait(self, when: When) -> None:
        self.phase = _P.WAITING
        self._waits_since_ms = when.at_ms
        self._kind_unknown = False

    # ------------------------------------------------------------------- steps

    def plan(self, plan: StepPlan, notes: Sequence[Preempted] | None) -> None:
        """The plan whose result comes next.

        Args:
            notes: preemptions that replaying it gave; None: it was not replayed.
        """
        # Plans in flight are made before the results that come before theirs are known.
        told = self._story.events
        when = When(max(plan.now_ms, told[-1].when.at_ms if told else 0))
        self._planned = (plan.step, When(plan.now_ms))
        if notes is not None:
            for note in notes:
                if note.request_id == self._request_id:
                    self._preempted(note, plan.step, when)
            return
        mine = self._handles()
        if self.phase in _HAS_BLOCKS and np.isin(plan.retired, mine).any():
            handles = np.concatenate([plan.grown_handles, plan.replaced_handles])
            by = self._crowd.owners(handles, UNNAMED)
            by |= self._crowd.owners(plan.retired)  # that gave up, too, may have wanted more first
            by -= {self._request_id}
            if not by or self._may_open_block():
                by.add(self._request_id)
            self._deduced(plan.step, when, sorted(by), may_swap=len(plan.swap_out_device) > 0)

    def _may_open_block(self) -> bool:
        """Whether it may have needed a block itself in the step that is planned: the latest
        request that does has to go for its own sake."""
        handles = self._handles()
        if self._block_size is None or self._is_search or len(handles) != 1:
            return True
        is_at_border = (self._num_tokens_of(handles) - 1) % self._block_size == 0
        return self.phase is _P.RUNNING and is_at_border

    def _preempted(self, note: Preempted, step: int, when: When) -> None:
        by = "itself" if note.by == self._request_id else note.by
        kept = "kept in the host pool" if note.kind == Preemption.SWAP else "to be computed again"
        late = "; its end was known only afterwards" if self.phase is _P.ENDED else ""
        text = f"preempted by {by} in step {step} ({note.kind}): {note.num_tokens} tokens {kept}"
        self._story.tell(
            Kind.PREEMPTED,
            when,
            text + late,
            step=step,
            by=[note.by],
            preemption=note.kind,
            num_tokens=note.num_tokens,
        )
        if self.phase is not _P.ENDED:
            self._wait(when)
            self.phase = _P.PREEMPTED

    def _deduced(self, step: int, when: When, by: list[str] | None, may_swap: bool | None) -> None:
        """A preemption that nobody noted.

        Args:
            by: all who may have needed the blocks; None: nobody knows.
            may_swap: whether blocks were swapped in that step; None: nobody knows.
        """
        if by is None:
            whom = _BY_UNKNOWN
        else:
            names = ["itself" if name == self._request_id else name for name in by]
            whom = f"by {names[0]}" if len(names) == 1 else f"by one of {listed(names)}"
        num_tokens = self._num_tokens_in_all()
        kind = Preemption.RECOMPUTE.value if may_swap is False else None
        text = f"preempted in step {step} with {num_tokens} tokens, {whom}"
        facts = {"step": step, "by": by, "preemption": kind, "num_tokens": num_tokens}
        self._story.tell(Kind.PREEMPTED, when, text, **facts)
        self._wait(when)
        self.phase = _P.PREEMPTED
        self._kind_unknown = kind is None

    def result(self, result: StepResult, when: When) -> None:
        """What a step made of the request."""
        if self._last_step is not None and result.step <= self._last_step:
            return
        if self._last_step is not None and result.step != self._last_step + 1:
            self._lose_sight(f"steps {self._last_step + 1} to {result.step - 1} are missing", when)
        self._last_step = result.step
        if self.phase not in (_P.UNSEEN, _P.ENDED):
            self._follow(result, when)
        self._crowd.computed(result)

    def _follow(self, result: StepResult, when: When) -> None:
        mine = self._handles()
        admitted = np.isin(result.admitted_handles, mine)
        if admitted.any():
            computed = result.admitted_computed[admitted].tolist()
            self._admitted(result.admitted_handles[admitted].tolist(), computed, result.step, when)
        if self._is_search:
            if any(found.group in mine for found in result.beams):
                self._num_rounds += 1
                self._sampled(result.step, when)
            return
        rows = np.flatnonzero(np.isin(result.handles, mine)).tolist()
        if rows:
            self._sampled(result.step, when)
        elif self.phase is _P.RUNNING:
            self._deduced(result.step, When(when.at_ms, True), None, None)
        by_handle = {c.handle: (n, c) for n, c in self._choices.items() if not c.finish_reason}
        for row in rows:
            by_handle[int(result.handles[row])][1].num_tokens += 1
        flags = dict(zip(result.ended_rows.tolist(), result.ended_flags.tolist(), strict=False))
        for row in rows:
            if row in flags:
                number = by_handle[int(result.handles[row])][0]
                self._end_choice(number, EndFlag(flags[row]).finish_reason(), when)

    def _admitted(self, handles: list[int], computed: list[int], step: int, when: When) -> None:
        if self._planned is not None and self._planned[0] == step:
            when = When(max(self._planned[1].at_ms, self._waits_since_ms))
        total, reused = self._num_tokens_of(handles), sum(computed)
        waited_ms = max(0, when.at_ms - self._waits_since_ms)
        facts = {"step": step, "waited_ms": waited_ms, "num_tokens": total, "num_reused": reused}
        after = f"in step {step} after {waited_ms / 1e3:.3f} s"
        if not self._was_admitted and not self._has_output:
            text = f"admitted {after}; {reused} of {total} tokens come from the prefix cache"
            self._story.tell(Kind.ADMITTED, when, text, **facts)
        else:
            if self.phase is _P.PREFILLING:
                self._story.tell(
                    Kind.PREEMPTED,
                    When(when.at_ms, True),
                    f"preempted while it was computed, between steps {self._admitted_step} and "
                    f"{step}; {_BY_UNKNOWN}",
                    step=None,
                    by=None,
                    preemption=Preemption.RECOMPUTE.value,
                    num_tokens=None,
                )
            kind = self._kind_of_return(handles, computed) if self._kind_unknown else None
            how = f"; {kind}" if kind else ""
            text = f"admitted again {after}; {reused} of {total} tokens were still there, "
            text += f"{total - reused} are computed again{how}"
            self._story.tell(Kind.ADMITTED_AGAIN, when, text, **facts)
        self.phase, self._admitted_step = _P.PREFILLING, step
        self._was_admitted, self._kind_unknown = True, False

    def _kind_of_return(self, handles: list[int], computed: list[int]) -> str:
        """How it had been preempted, from what it came back with."""
        missing = [self._num_tokens_of([h]) - n for h, n in zip(handles, computed, strict=True)]
        if any(number != 1 for number in missing):
            return "so it had given its blocks up (recompute)"
        size = self._block_size
        if size is not None and any(number % size for number in computed):
            return "so it had been swapped out (swap)"
        return "swapped out, or all found in the prefix cache: that is not certain"

    def _sampled(self, step: int, when: When) -> None:
        """A step gave the request a token."""
        if self.phase is _P.RUNNING:
            return
        took = step - self._admitted_step + 1 if self.phase is _P.PREFILLING else None
        steps = "" if took is None else f"; computed in {counted(took, 'step')}"
        if not self._has_output and self._num_rounds <= 1:
            text = f"first token in step {step}{steps}"
            self._story.tell(Kind.FIRST_TOKEN, when, text, step=step, num_prefill_steps=took)
        elif self.phase is _P.PREFILLING:
            text = f"goes on in step {step}{steps}"
            self._story.tell(Kind.RESUMED, when, text, step=step, num_prefill_steps=took)
        self.phase = _P.RUNNING

    # ----------------------------------------------------------------- endings

    def choice_ended(self, message: ChoiceEnded, when: When) -> None:
        """A choice of anybody ended by a stop string."""
        self._crowd.choice_ended(message.request_id, message.choice)
        if message.request_id == self._request_id and message.choice in self._choices:
            self._end_choice(message.choice, message.reason, when)

    def _end_choice(self, number: int, reason: str, when: When) -> None:
        choice = self._choices[number]
        if choice.finish_reason:
            return
        choice.finish_reason = str(reason)
        if len(self._choices) > 1:
            text = f"choice {number} ended after {counted(choice.num_tokens, 'token')}: {reason}"
            facts = {"choice": number, "reason": str(reason), "num_tokens": choice.num_tokens}
            self._story.tell(Kind.CHOICE_ENDED, when, text, **facts)
        if all(found.finish_reason for found in self._choices.values()):
            self._end(str(reason), "", list(self.num_tokens.values()), when)

    def request_ended(self, message: RequestEnded, when: When) -> None:
        """A request of anybody ended, or was never accepted."""
        self._crowd.ended(message.request_id)
        if message.request_id == self._request_id:
            lengths = [] if self._is_search else list(self.num_tokens.values())
            self._end(message.reason, message.error, lengths, when)

    def beams_ended(self, message: BeamsEnded, when: When) -> None:
        """A beam search of anybody is over."""
        self._crowd.ended(message.request_id)
        if message.request_id == self._request_id:
            lengths = [len(found.tokens) for found in message.hypotheses]
            self._end(FinishReason.STOP, "", lengths, when)

    def _end(self, reason: str, error: str, lengths: list[int], when: When) -> None:
        if self.phase is _P.ENDED:
            text = f"its end was said again: {reason}"
            self._story.tell(Kind.TOLD_AGAIN, when, text, reason=str(reason))
            return
        after = f" after {listed([str(length) for length in lengths])} tokens" if lengths else ""
        why = f" ({error})" if error else ""
        text = f"ended{after}: {reason}{why}"
        self._story.tell(
            Kind.ENDED, when, text, reason=str(reason), error=error, num_tokens=lengths
        )
        self.phase = _P.ENDED

    # ------------------------------------------------------------------ epochs

    def epoch(self, started: EpochStarted, when: When) -> None:
        """A new regime: handles mean nothing any more until they are said again."""
        parties = (started.scheduler, started.workers)
        if self.phase not in (_P.UNSEEN, _P.ENDED):
            suspect = bool(np.isin(started.suspects, self._handles()).any())
            why = _why_new(self._parties, parties)
            while_computed = "; it was being computed" if suspect else ""
            text = f"epoch {started.epoch} begins: {why}{while_computed}"
            facts = {"epoch": started.epoch, "scheduler": started.scheduler}
            self._story.tell(
                Kind.EPOCH, when, text, workers=list(started.workers), suspect=suspect, **facts
            )
        self._parties = parties if any(parties) else None
        self._crowd.new_epoch()
        self._forget_handles()
        self._is_new_epoch, self._last_step, self._planned = True, 0, None

    def _lose_sight(self, why: str, when: When) -> None:
        if self.phase not in (_P.UNSEEN, _P.ENDED):
            self._story.tell(Kind.LOST_SIGHT, when, f"lost from sight: {why}")
            self._story.admit_ignorance(f"what the missing entries of outputs said: {why}")
        self._crowd.new_epoch()
        self._forget_handles()

    def _forget_handles(self) -> None:
        for choice in self._choices.values():
            choice.handle = 0
        if self.phase is _P.RUNNING:
            self.phase = _P.WAITING

    # ----------------------------------------------------------------- lengths

    @property
    def _is_search(self) -> bool:
        return self.submit is not None and self.submit.sampling.beams is not None

    @property
    def _has_output(self) -> bool:
        return any(found.num_tokens for found in self._choices.values())

    def _handles(self) -> list[int]:
        return [c.handle for c in self._choices.values() if not c.finish_reason and c.handle]

    def _num_tokens_of(self, handles: list[int]) -> int:
        num_prompt = 0 if self.submit is None else len(self.submit.prompt)
        found = [choice for choice in self._choices.values() if choice.handle in handles]
        return sum(num_prompt + choice.num_tokens for choice in found)

    def _num_tokens_in_all(self) -> int:
        return self._num_tokens_of(self._handles())


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
