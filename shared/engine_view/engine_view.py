"""Follows an engine's plans and outputs from a snapshot on."""

import json
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from shared.bus.api import EntryId
from shared.engine_view.block_reuse import BlockReuse
from shared.engine_view.marks import Mark, MarkKind, words_of_epoch, words_of_preemption
from shared.engine_view.sequences import RequestView, SequenceView, preempted_search
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState
from shared.messages.plans import Admission, EpochStarted, PlannedPreemption, StepPlan
from shared.messages.snapshots import PoolSnapshot, RequestPhase, RequestSnapshot
from shared.outputs_log.events import OutputsEvent, Step

_MOST_ENDED = 64  # requests that have ended and are still shown
_MOST_STEPS = 256
_MOST_MARKS = 256
# Looking up a member of an enum takes as long as several look-ups in a dictionary.
_WAITING, _PREFILL, _DECODE, _PREEMPTED, _SWAPPED, _ENDED = RequestPhase


class EngineView:
    """Pool and requests of one engine.

    Args:
        number_of: the number that stands for a request's id.
        snapshot: the state to begin with.
        at: id of its entry.

    Attributes:
        step: last plan that was applied.
        now_ms: when it was made, by the engine's clock.
        requests: by id; those that ended last are among them.
        sequences: those with blocks, by handle.
        host_owners: [num_host_blocks] numbers of requests, 0 for free blocks.
        is_cached, is_pinned: [num_blocks] as of the last snapshot.
        reuse: of blocks with known content, since the snapshot.
        changed: requests that changed since this was cleared, by number.
        phases: how many requests are in each phase.
        marks, num_marks: the last ones, and how many there were.
    """

    def __init__(
        self, number_of: Callable[[str], int], snapshot: PoolSnapshot, at: EntryId
    ) -> None:
        self._number_of = number_of
        self.geometry = snapshot
        self.epoch = at.epoch
        self.step = snapshot.step
        self.now_ms = at.epoch + at.seq
        self.requests: dict[str, RequestView] = {}
        self.sequences: dict[int, SequenceView] = {}
        self.phases: Counter[RequestPhase] = Counter()
        self.changed: dict[int, RequestView] = {}
        self.host_owners = np.zeros(snapshot.num_host_blocks, np.int32)
        self.is_cached = np.zeros(snapshot.num_blocks, bool)
        self.is_pinned = np.zeros(snapshot.num_blocks, bool)
        keeps_cached = json.loads(snapshot.settings).get("prefix_caching", True)
        self.reuse = BlockReuse(snapshot.num_blocks, snapshot.block_size, keeps_cached)
        self.marks: deque[Mark] = deque(maxlen=_MOST_MARKS)
        self.num_marks = 0
        # [step, at_ms, batched tokens, prompt tokens, waiting, running, microseconds]
        self.steps: deque[list[int]] = deque(maxlen=_MOST_STEPS)
        self._request_of: dict[int, RequestView] = {}  # by handle in results
        self._planned: dict[int, tuple[int, int]] = {}  # of steps without result: time, prompts
        self._ended: deque[RequestView] = deque()
        self._result_step = snapshot.step
        for found in snapshot.requests:
            self._restore(found)
        self.correct(snapshot)

    def correct(self, snapshot: PoolSnapshot) -> None:
        """Take over which blocks are cached and pinned: plans do not show that."""
        had_table = np.zeros(len(self.is_cached), bool)
        for found in snapshot.requests:
            had_table[found.block_tables] = True
        self.is_cached &= had_table  # what was released since
        self.is_cached[snapshot.cached] = True
        self.reuse.correct(snapshot.cached, had_table)
        self.is_pinned[:] = False
        self.is_pinned[snapshot.pinned] = True
        for found in snapshot.requests:
            request = self.requests.get(found.request_id)
            # Results that were in flight when beams were swapped out change which are kept.
            if found.search and request is not None and request.phase is _SWAPPED:
                request.hosts = {request.search: found.host_tables}
                self._own_hosts(request)

    def continue_from(self, before: "EngineView") -> None:
        """Take over marks and steps; what has lost its worker is marked as recovered."""
        self.marks.extend(before.marks)
        self.num_marks = before.num_marks
        self.steps.extend(before.steps)
        for request in self.requests.values():
            known = before.requests.get(request.request_id)
            if known is not None and known.phase not in (_WAITING, _ENDED):
                text = f"#{request.number} goes on with {request.num_generated} tokens"
                self._mark(MarkKind.RECOVERED, request.number, text)

    def mark_epoch(self, before: EpochStarted | None, started: EpochStarted) -> None:
        """Mark the start of an epoch."""
        text = words_of_epoch(before, started)
        self._add_mark(Mark(MarkKind.EPOCH, started.epoch, 0, 0, text))

    # ------------------------------------------------------------------- plans

    def has_request_of(self, admission: Admission) -> bool:
        """Whether the request of a sequence that a plan admits was seen."""
        is_beam = admission.sampling.beams is not None
        return admission.handle in self._request_of or (
            is_beam and preempted_search(self.requests.values(), admission) is not None
        )

    def plan(self, plan: StepPlan) -> None:
        """Apply the next plan."""
        self.step, self.now_ms = plan.step, max(self.now_ms, plan.now_ms)
        sequences = self.sequences
        for preemption in plan.preemptions:
            self._preempt(plan, preemption)
        retired = {handle: sequences.get(handle) for handle in plan.retired.tolist()}
        self._drop_retired(retired)
        for beams in plan.beams:
            if (request := self._request_of.get(beams.group)) is not None:
                self._request_of.update(dict.fromkeys(beams.handles.tolist(), request))
            parents = [sequences.get(h) or retired.get(h) for h in beams.parents.tolist()]
            for handle, parent in zip(beams.handles.tolist(), parents, strict=False):
                if parent is not None and handle not in sequences:
                    self._add(parent.fork(handle))
        if len(plan.swap_in_host):
            self.host_owners[plan.swap_in_host] = 0
        if len(plan.copy_targets):
            self._copy(plan)
        swapped_in = plan.swap_in_device.tolist()
        for admission in plan.admissions:
            self._admit(admission, swapped_in)
        self.reuse.take(blocks := plan.grown_blocks.tolist())
        grown = zip(plan.grown_handles.tolist(), blocks, strict=True)
        for handle, block in grown:
            if (sequence := sequences.get(handle)) is not None:
                sequence.grow(block)
        chunk_tokens = plan.chunk_tokens.tolist()
        for handle, num_tokens in zip(plan.chunk_handles.tolist(), chunk_tokens, strict=True):
            self._compute(handle, num_tokens)
        forks = zip(plan.fork_parents.tolist(), plan.fork_children.tolist(), strict=True)
        for parent_handle, child in forks:
            if (parent := sequences.get(parent_handle)) is not None:
                self._add(parent.fork(child))
        self._planned[plan.step] = (plan.now_ms, sum(chunk_tokens))
        if len(self._planned) > _MOST_STEPS:
            self._planned.pop(next(iter(self._planned)))

    def _copy(self, plan: StepPlan) -> None:
        """Put the targets of copies into tables."""
        self.reuse.take(copies := plan.copy_targets.tolist())
        replaced = zip(plan.replaced_handles.tolist(), plan.replaced_columns.tolist(), strict=True)
        for (handle, column), block in zip(replaced, copies, strict=True):
            if (sequence := self.sequences.get(handle)) is not None:
                sequence.replace(column, block)

    def _preempt(self, plan: StepPlan, found: PlannedPreemption) -> None:
        request = self.requests.get(found.request_id)
        if request is None:
            return
        is_swap = found.kind == "swap"
        if is_swap:
            request.swap_out(plan)
            self._own_hosts(request)
        by = self._number_of(found.by)
        words = words_of_preemption(found, f"#{request.number}", f"#{by}")
        text = f"step {plan.step}: #{request.number} {words}"
        kind = MarkKind.SWAPPED if is_swap else MarkKind.PREEMPTED
        self._mark(kind, request.number, text)
        for handle in list(request.sequences):
            self._remove(handle, is_preempted=True)
        self._move(request, _SWAPPED if is_swap else _PREEMPTED)

    def _own_hosts(self, request: RequestView) -> None:
        self.host_owners[self.host_owners == request.number] = 0
        for blocks in request.hosts.values():
            self.host_owners[blocks] = request.number

    def _drop_retired(self, retired: dict[int, SequenceView | None]) -> None:
        """Remove sequences that lost their blocks, although they have not ended so far."""
        for handle, sequence in retired.items():
            if sequence is None:
                continue
            request = sequence.request
            self._remove(handle)
            if not request.sequences and not request.search and request.phase is not _ENDED:
                self._move(request, _PREEMPTED)

    def _admit(self, admission: Admission, swapped_in: list[int]) -> None:
        table = admission.block_table
        self.reuse.admit(table, admission.num_computed, bool(swapped_in) and table[0] in swapped_in)
        request = self._request_of.get(admission.handle)
        if request is None and admission.sampling.beams is not None:
            request = preempted_search(self.requests.values(), admission)
        if request is None:
            return  # it computes a pinned prefix
        if request.hosts.pop(request.search or admission.handle, None) is not None:
            self._own_hosts(request)
        request.num_prompt_tokens = admission.num_prompt_tokens
        limit = self.geometry.max_model_len - admission.num_prompt_tokens
        request.max_output = min(admission.sampling.max_tokens, limit)
        num_tokens = len(admission.tokens)
        sequence = SequenceView(admission.handle, request, admission.num_computed, num_tokens)
        sequence.table = table
        if request.phase in (_PREEMPTED, _SWAPPED):
            rest = num_tokens - admission.num_computed
            text = f"step {self.step}: #{request.number} has blocks again, {rest} of {num_tokens} "
            self._mark(MarkKind.READMITTED, request.number, text + "tokens are computed again")
        self._add(sequence)
        self._move(request, _PREFILL)

    def _compute(self, handle: int, num_tokens: int) -> None:
        sequence = self.sequences.get(handle)
        if sequence is None:
            return
        sequence.num_computed += num_tokens
        request = sequence.request
        if sequence.num_computed >= sequence.num_tokens:
            if not request.search:
                sequence.start_decoding(self.step)
            if request.phase is _PREFILL and all(
                found.num_computed >= found.num_tokens for found in request.sequences.values()
            ):
                self._move(request, _DECODE)

    # ----------------------------------------------------------------- outputs

    def apply(self, event: OutputsEvent) -> None:
        """Apply the next event of ``outputs``."""
        match event:
            case Step():
                self._take_step(event)
            case RequestState():
                self._take_state(event)
            case ChoiceEnded():
                if (request := self.requests.get(event.request_id)) is not None:
                    self._end_choice(request, request.handles.get(event.choice, 0), event.reason)
            case RequestEnded():
                self._end(event.request_id, event.reason)
            case BeamsEnded():
                self._end(event.request_id, "stop")

    def _take_step(self, step: Step) -> None:
        result = step.result
        self._result_step = result.step
        at_ms, num_prompt_tokens = self._planned.pop(result.step, (self.now_ms, 0))
        waiting = self.phases[_WAITING] + self.phases[_PREEMPTED] + self.phases[_SWAPPED]
        running = self.phases[_PREFILL] + self.phases[_DECODE]
        row = [result.step, at_ms, result.num_batched_tokens, num_prompt_tokens]
        self.steps.append([*row, waiting, running, result.step_us])
        request_of, changed, ends = self._request_of.get, self.changed, step.ends
        for row_number, handle in enumerate(step.handles):
            if (request := request_of(handle)) is not None:
                request.num_generated += 1
                changed[request.number] = request
                if row_number in ends:
                    self._end_choice(request, handle, ends[row_number])
        for found in result.beams:
            if (request := self._request_of.get(found.group)) is not None:
                request.num_generated += 1
                self.changed[request.number] = request

    def _take_state(self, state: RequestState) -> None:
        submit = state.submit
        handles = {c.choice: c.handle for c in state.choices if not c.finish_reason}
        is_search = submit.sampling.beams is not None
        request = self.requests.get(submit.request_id)
        if request is not None and (
            request.handles == handles
            or (is_search and request.search in handles.values())
            or not handles
        ):
            return
        if request is not None:
            self._forget(request)
        if not handles:
            return
        number = self._number_of(submit.request_id)
        request = RequestView(number, submit.request_id, submit.tenant)
        request.priority, request.accepted_ms = submit.priority, state.accepted_ms
        request.num_prompt_tokens = submit.num_prompt_tokens
        request.max_output = submit.sampling.max_tokens
        request.num_generated = sum(len(choice.output) for choice in state.choices)
        request.handles = handles
        if is_search:
            request.search = next(iter(handles.values()))
        self._enter(request)

    # ---------------------------------------------------------------- requests

    def _restore(self, found: RequestSnapshot) -> None:
        number = self._number_of(found.request_id)
        request = RequestView(number, found.request_id, found.tenant)
        request.phase = RequestPhase(found.phase)
        request.priority, request.accepted_ms = found.priority, found.accepted_ms
        request.num_prompt_tokens, request.max_output = found.num_prompt_tokens, found.max_output
        handles = found.handles.tolist()
        request.num_generated = found.num_generated * max(1, len(handles))
        request.search = found.search
        # Its choices are not known by number: the next RequestState tells, or a result ends them.
        request.handles = dict(enumerate(handles))
        self._enter(request)
        ends = np.cumsum(found.host_lengths)[:-1]
        if len(found.host_tables):
            request.hosts = dict(zip(handles, np.split(found.host_tables, ends), strict=True))
        self._own_hosts(request)
        first = 0
        rows = zip(handles, found.num_computed.tolist(), found.table_lengths.tolist(), strict=True)
        for handle, num_computed, length in rows:
            table = found.block_tables[first : first + length]
            first += length
            if length:
                sequence = SequenceView(handle, request, num_computed, found.num_tokens)
                sequence.table = table
                if found.decode_from:
                    sequence.num_computed = found.num_tokens
                    sequence.start_decoding(found.decode_from - 1)
                self._add(sequence)

    def _enter(self, request: RequestView) -> None:
        self.requests[request.request_id] = request
        self.phases[request.phase] += 1
        self.changed[request.number] = request
        for handle in (*request.handles.values(), *([request.search] if request.search else ())):
            self._request_of[handle] = request

    def _forget(self, request: RequestView) -> None:
        """Drop a request, which comes again under other handles."""
        self._drop_handles(request)
        self.phases[request.phase] -= 1
        self.requests.pop(request.request_id, None)

    def _drop_handles(self, request: RequestView) -> None:
        for handle in list(request.sequences):
            self._remove(handle)
        for handle in (*request.handles.values(), request.search, *request.beams):
            self._request_of.pop(handle, None)
        request.beams.clear()
        if request.hosts:
            request.hosts.clear()
            self._own_hosts(request)

    def _end_choice(self, request: RequestView, handle: int, reason: str) -> None:
        self._remove(handle)
        self._request_of.pop(handle, None)
        request.handles = {c: h for c, h in request.handles.items() if h != handle}
        if request.hosts.pop(handle, None) is not None:
            self._own_hosts(request)
        if not request.handles:
            self._end(request.request_id, reason)

    def _end(self, request_id: str, reason: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.phase is _ENDED:
            return
        self._drop_handles(request)
        request.end = str(reason)
        self._move(request, _ENDED)
        text = f"#{request.number} ended after {request.num_generated} tokens: {request.end}"
        self._mark(MarkKind.ENDED, request.number, text)
        self._ended.append(request)
        while len(self._ended) > _MOST_ENDED:
            old = self._ended.popleft()
            if self.requests.get(old.request_id) is old:
                del self.requests[old.request_id]
                self.phases[_ENDED] -= 1

    def _move(self, request: RequestView, phase: RequestPhase) -> None:
        self.phases[request.phase] -= 1
        self.phases[phase] += 1
        request.phase = phase
        self.changed[request.number] = request

    def _add(self, sequence: SequenceView) -> None:
        self.sequences[sequence.handle] = sequence
        sequence.request.sequences[sequence.handle] = sequence
        self._request_of[sequence.handle] = sequence.request

    def _remove(self, handle: int, is_preempted: bool = False) -> None:
        sequence = self.sequences.pop(handle, None)
        if sequence is not None:
            request = sequence.request
            request.sequences.pop(handle, None)
            self.reuse.release(sequence, self._result_step, is_preempted)
            if request.search:
                request.beams.add(handle)

    def _mark(self, kind: MarkKind, number: int, text: str) -> None:
        self._add_mark(Mark(kind, self.now_ms, self.step, number, text))

    def _add_mark(self, mark: Mark) -> None:
        self.marks.append(mark)
        self.num_marks += 1
