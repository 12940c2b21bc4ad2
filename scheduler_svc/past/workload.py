"""The requests of a stretch of the logs, with the tokens that they got. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler_svc.past.stretch import StretchLogs
from shared.codec import IntArray, decode, decode_as
from shared.errors import DecodeError
from shared.messages.outputs import BeamsEnded, RequestEnded, RequestState, StepResult
from shared.messages.plans import StepPlan
from shared.messages.requests import Submit
from shared.messages.snapshots import PoolSnapshot, RequestPhase, RequestSnapshot
from shared.sampling import SamplingParams

_OWN = 1 << 28  # tokens of prompts that the logs do not show; no vocabulary has them


@dataclass(slots=True)
class PastRequest:
    """A request.

    Attributes:
        at_ms: when it came, by the engine's clock.
        lengths: tokens that each choice generated, as far as the logs show.
    """

    submit: Submit
    at_ms: int
    lengths: dict[int, int] = field(default_factory=dict)
    is_ended: bool = False

    def target(self, choice: int) -> int:
        """Tokens that a choice generates: all that it may where its end is not seen."""
        most = self.submit.sampling.max_tokens
        return max(1, min(most, self.lengths.get(choice, 0))) if self.is_ended else most


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival, and the speed of steps.

    Attributes:
        step_us: of a step without tokens, and for each token.
        num_preemptions: that there were.
    """

    requests: list[PastRequest]
    step_us: tuple[float, float]
    num_preemptions: int


def workload_of(logs: StretchLogs, until_ms: int) -> Workload:
    """The requests that ran in a stretch or came in it.

    Raises:
        DecodeError: the first snapshot cannot be decoded.
    """
    snapshot: PoolSnapshot = decode_as(PoolSnapshot, logs.snapshots[0].messages[0])
    start_ms = logs.snapshots[0].id.epoch + logs.snapshots[0].id.seq
    by_handle: dict[int, tuple[PastRequest, int]] = {}
    found: dict[str, PastRequest] = {}
    for number, running in enumerate(snapshot.requests):
        request = PastRequest(_submit_of(running, number, snapshot), start_ms)
        found[running.request_id] = request
        for choice, handle in enumerate(running.handles.tolist()):
            by_handle[handle] = (request, choice)
    prompts = _prompts(logs)
    steps: list[tuple[int, int]] = []
    for message in _decoded(entry.messages for entry in logs.outputs):
        if isinstance(message, RequestState):
            if message.submit.request_id not in found and message.accepted_ms <= until_ms:
                found[message.submit.request_id] = _accepted(message, len(found), prompts)
            if (known := found.get(message.submit.request_id)) is not None:
                for state in message.choices:
                    by_handle[state.handle] = (known, state.choice)
        elif isinstance(message, StepResult):
            steps.append((message.num_batched_tokens, message.step_us))
            ended = set(message.ended_rows.tolist())
            for row, handle in enumerate(message.handles.tolist()):
                if (pair := by_handle.get(handle)) is not None:
                    request, choice = pair
                    request.lengths[choice] = request.lengths.get(choice, 0) + 1
                    request.is_ended = request.is_ended or row in ended
        elif isinstance(message, RequestEnded | BeamsEnded) and message.request_id in found:
            found[message.request_id].is_ended = True
    plans = _decoded(entry.messages for entry in logs.plans)
    num_preemptions = sum(
        len(plan.preemptions)
        for plan in plans
        if isinstance(plan, StepPlan) and plan.now_ms <= until_ms
    )
    requests = sorted(found.values(), key=lambda one: one.at_ms)
    return Workload(requests, _fitted(steps), num_preemptions)


def _submit_of(running: RequestSnapshot, number: int, snapshot: PoolSnapshot) -> Submit:
    """A request that ran already: what it had generated is prompt here."""
    num_tokens = min(running.num_prompt_tokens + _generated(running), snapshot.max_model_len - 1)
    num_left = max(1, running.max_output - _generated(running))
    return Submit(
        request_id=running.request_id,
        gateway="",
        attachment="",
        prompt=np.full(max(1, num_tokens), _OWN + number, np.int32),
        sampling=SamplingParams.greedy(num_left),
        received_ms=0,
        num_choices=max(1, len(running.handles)),
        priority=running.priority,
        cache_salt="",
        tenant=running.tenant,
    )


def _generated(running: RequestSnapshot) -> int:
    return 0 if running.phase == RequestPhase.WAITING else running.num_generated


def _prompts(logs: StretchLogs) -> dict[int, IntArray]:
    """Prompts [num_prompt_tokens] by the handles of admissions; ``outputs`` has none."""
    plans = _decoded(entry.messages for entry in logs.plans)
    return {
        admission.handle: admission.tokens[: admission.num_prompt_tokens]
        for plan in plans
        if isinstance(plan, StepPlan)
        for admission in plan.admissions
    }


def _accepted(state: RequestState, number: int, prompts: Mapping[int, IntArray]) -> PastRequest:
    submit = state.submit
    prompt = submit.prompt
    for choice in state.choices:
        if submit.lacks_prompt and (tokens := prompts.get(choice.handle)) is not None:
            whole = submit.with_prompt(tokens)
            prompt = prompt if whole is None else whole.prompt
    if not len(prompt):  # it was not admitted in the stretch
        prompt = np.full(max(1, submit.num_prompt_tokens), _OWN + number, np.int32)
    sampling = SamplingParams.greedy(submit.sampling.max_tokens)
    submit = replace(
        submit,
        gateway="",
        attachment="",
        prompt=prompt,
        prompt_digest=b"",
        omitted_tokens=0,
        sampling=sampling,
        deadline_ms=0,
        display=b"",
    )
    return PastRequest(submit, state.accepted_ms)


def _fitted(steps: list[tuple[int, int]]) -> tuple[float, float]:
    """Microseconds of a step and of each of its tokens, by least squares."""
    if not steps:
        return 1_000.0, 10.0
    tokens, times = np.array(steps, np.float64).T
    if np.ptp(tokens) < 1:
        return float(np.median(times)), 0.0
    each = max(0.0, float(np.polyfit(tokens, times, 1)[0]))
    return max(1.0, float(np.mean(times) - each * np.mean(tokens))), each


def _decoded(entries: Iterable[tuple[bytes, ...]]) -> Iterable[object]:
    for messages in entries:
        for data in messages:
            try:
                yield decode(data)
            except DecodeError:
                continue
