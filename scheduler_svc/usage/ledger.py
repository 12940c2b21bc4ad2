"""Adds up what each API key used, from an engine's outputs log. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.explain.merged_logs import LoggedMessage
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState
from shared.messages.plans import EpochStarted
from shared.outputs_log.events import Damaged, Gap, OutputsEvent, Step
from shared.outputs_log.reader import OutputsReader


@dataclass(slots=True)
class Usage:
    """What a key used; the metrics ``tenant_tokens`` and ``tenant_block_seconds`` count the same.

    Attributes:
        computed: prompt tokens of first admissions that were computed.
        cached: prompt tokens of first admissions that were found in the prefix cache.
        generated: tokens that were sampled; of a beam search, those of its results.
        recomputed: tokens computed again after preemptions and failures.
        block_seconds: blocks in block tables, times the durations of steps; a shared block counts
            for each.
    """

    requests: int = 0
    computed: int = 0
    cached: int = 0
    generated: int = 0
    recomputed: int = 0
    block_seconds: float = 0.0

    def add(self, other: "Usage") -> None:
        """Add that of another key, or of another engine."""
        self.requests += other.requests
        self.computed += other.computed
        self.cached += other.cached
        self.generated += other.generated
        self.recomputed += other.recomputed
        self.block_seconds += other.block_seconds


@dataclass(slots=True)
class _Choice:
    number: int
    handle: int
    num_tokens: int  # generated
    is_open: bool
    is_beam: bool


@dataclass(slots=True)
class _Request:
    tenant: str
    num_prompt: int | None  # None: the log has no entry with the prompt any more
    was_admitted: bool = False
    holds_blocks: bool = False
    decodes: bool = False  # it got a token since its last admission
    choices: list[_Choice] = field(default_factory=list)

    def num_blocks(self, block_size: int) -> int:
        """Blocks of the block tables of all its sequences."""
        before = self.num_prompt or 0
        return sum(
            -(-(before + choice.num_tokens) // block_size)
            for choice in self.choices
            if choice.is_open
        )


class Ledger:
    """Usage by tenant.

    Args:
        block_size: tokens in a block; None: no block-seconds are counted.

    Attributes:
        by_tenant: the tenant without API keys is "".
        num_unknown_prompts: admissions left out, because the log has lost the request's prompt.
        num_gaps: places where entries are missing or damaged; a beginning that was trimmed is none.
    """

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size
        self._reader = OutputsReader()
        self._requests: dict[str, _Request] = {}
        self._by_handle: dict[int, tuple[_Request, _Choice]] = {}
        self.by_tenant: defaultdict[str, Usage] = defaultdict(Usage)
        self.num_unknown_prompts = 0
        self.num_gaps = 0
        self._is_in_gap = True  # what is missing before the next result is one place

    def read(self, outputs: Iterable[LoggedMessage]) -> None:
        """Take the next messages of the log."""
        for logged in outputs:
            for event in self._reader.read_message(logged.at, logged.message):
                self._apply(event)

    def _apply(self, event: OutputsEvent) -> None:
        match event:
            case EpochStarted():
                self._is_in_gap = False
                self._lose_handles()
            case Gap() | Damaged():
                self.num_gaps += isinstance(event, Damaged) or not self._is_in_gap
                self._is_in_gap = True
                self._lose_handles()
            case RequestState():
                self._state(event)
            case Step():
                self._is_in_gap = False
                self._step(event)
            case ChoiceEnded():
                self._end_choice(event.request_id, event.choice)
            case BeamsEnded():
                if (request := self._requests.get(event.request_id)) is not None:
                    usage = self.by_tenant[request.tenant]
                    usage.generated += sum(len(one.tokens) for one in event.hypotheses)
                self._forget(event.request_id)
            case RequestEnded():
                self._forget(event.request_id)

    def _state(self, state: RequestState) -> None:
        submit = state.submit
        request = self._requests.get(submit.request_id)
        if request is None:
            request = self._requests[submit.request_id] = _Request(submit.tenant, None)
            self.by_tenant[submit.tenant].requests += 1
        if submit.num_prompt_tokens:
            request.num_prompt = submit.num_prompt_tokens
        has_output = any(len(choice.output) for choice in state.choices)
        request.was_admitted |= state.was_admitted or has_output
        self._drop_handles(request)
        is_search = submit.sampling.beams is not None
        request.choices = [
            _Choice(
                found.choice, found.handle, len(found.output), not found.finish_reason, is_search
            )
            for found in state.choices
        ]
        for choice in request.choices:
            if choice.is_open:
                self._by_handle[choice.handle] = request, choice

    def _step(self, step: Step) -> None:
        admitted: defaultdict[int, list[tuple[_Choice, int]]] = defaultdict(list)
        for handle, num_reused in step.admissions():
            if (found := self._by_handle.get(handle)) is not None:
                admitted[id(found[0])].append((found[1], num_reused))
        for request in self._requests.values():
            if (choices := admitted.get(id(request))) is not None:
                self._admit(request, choices)
        self._count_blocks(step)
        searches = {found.group for found in step.result.beams}
        sampled = {handle for handle in step.handles if handle in self._by_handle} | searches
        for handle in sampled & self._by_handle.keys():
            request, choice = self._by_handle[handle]
            request.decodes = True
            if choice.is_beam:
                for beam in request.choices:
                    beam.num_tokens += 1
            else:
                choice.num_tokens += 1
                self.by_tenant[request.tenant].generated += 1
        for row in step.ends:
            if (found := self._by_handle.pop(step.handles[row], None)) is not None:
                found[1].is_open = False
        if step.ends:
            self._drop_ended()

    def _admit(self, request: _Request, admitted: list[tuple[_Choice, int]]) -> None:
        again, request.was_admitted = request.was_admitted, True
        request.holds_blocks, request.decodes = True, False
        if request.num_prompt is None:
            self.num_unknown_prompts += 1
            return
        usage = self.by_tenant[request.tenant]
        num_reused = sum(reused for _, reused in admitted)
        num_tokens = sum(request.num_prompt + choice.num_tokens for choice, _ in admitted)
        if again:
            usage.recomputed += num_tokens - num_reused
        else:
            usage.computed += num_tokens - num_reused
            usage.cached += num_reused

    def _count_blocks(self, step: Step) -> None:
        """Add the blocks of running requests; one that decodes and gets no token was preempted."""
        sampled = {*step.handles, *(found.group for found in step.result.beams)}
        for request in self._requests.values():
            handles = {choice.handle for choice in request.choices if choice.is_open}
            if request.decodes and not handles & sampled:
                request.holds_blocks = request.decodes = False
            if request.holds_blocks and self._block_size is not None:
                seconds = step.result.step_us / 1e6
                blocks = request.num_blocks(self._block_size)
                self.by_tenant[request.tenant].block_seconds += blocks * seconds

    def _end_choice(self, request_id: str, number: int) -> None:
        request = self._requests.get(request_id)
        for choice in () if request is None else request.choices:
            if choice.number == number:
                choice.is_open = False
                self._by_handle.pop(choice.handle, None)
        self._drop_ended()

    def _drop_ended(self) -> None:
        """Forget requests whose choices have all ended: the log has no other entry of their end."""
        for request_id, request in list(self._requests.items()):
            if not any(choice.is_open for choice in request.choices):
                del self._requests[request_id]

    def _forget(self, request_id: str) -> None:
        if (request := self._requests.pop(request_id, None)) is not None:
            self._drop_handles(request)

    def _drop_handles(self, request: _Request) -> None:
        for choice in request.choices:
            self._by_handle.pop(choice.handle, None)

    def _lose_handles(self) -> None:
        """Until their next states, nothing is counted for the open requests."""
        self._by_handle.clear()
        for request in self._requests.values():
            request.holds_blocks = request.decodes = False
