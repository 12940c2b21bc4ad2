"""Load of requests that wait to be admitted, and deadlines."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequences.sequence import ENDED, SequenceGroup
from shared.messages.requests import Submit

_CLEAN_AT = 1_024  # deadlines; beyond that, those of ended requests are dropped


@dataclass(slots=True)
class _Load:
    num_requests: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused.

    Attributes:
        for_all: whether every other request would be refused, too.
    """

    reason: str
    for_all: bool


def _num_tokens(submit: Submit) -> int:
    """The tokens of a request's prompt, and as many of its grammar as take the same memory."""
    return len(submit.prompt) + len(submit.sampling.grammar) // submit.prompt.itemsize


class Backlog:
    """Accepted requests that were never admitted: their number and tokens, by tenant and in all."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._all = _Load()
        self._by_tenant: defaultdict[str, _Load] = defaultdict(_Load)
        self._waiting: dict[str, int] = {}  # tokens by request

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests here."""
        return self._all.num_tokens

    def why_full(self, submit: Submit) -> Refusal | None:
        """Why a request exceeds a limit of waiting requests, or None."""
        config, num_tokens = self._config, _num_tokens(submit)
        mine = self._by_tenant.get(submit.tenant, _Load())
        limits = (
            ("requests", self._all.num_requests + 1, config.max_waiting_requests, ""),
            ("tokens", self._all.num_tokens + num_tokens, config.max_waiting_tokens, ""),
            ("requests", mine.num_requests + 1, config.max_tenant_requests, " with your key"),
            ("tokens", mine.num_tokens + num_tokens, config.max_tenant_tokens, " with your key"),
        )
        for what, wanted, limit, whose in limits:
            if 0 < limit < wanted:
                reason = f"{wanted} {what}{whose} would wait, at most {limit} may"
                return Refusal(reason, for_all=what == "requests" and not whose)
        return None

    def add(self, submit: Submit) -> None:
        """Count a request that waits."""
        num_tokens = _num_tokens(submit)
        self._waiting[submit.request_id] = num_tokens
        for load in (self._all, self._by_tenant[submit.tenant]):
            load.num_requests += 1
            load.num_tokens += num_tokens

    def remove(self, submit: Submit) -> None:
        """Count a request no more: it was admitted or has ended."""
        num_tokens = self._waiting.pop(submit.request_id, None)
        if num_tokens is None:
            return
        mine = self._by_tenant[submit.tenant]
        for load in (self._all, mine):
            load.num_requests -= 1
            load.num_tokens -= num_tokens
        if mine.num_requests == 0:
            del self._by_tenant[submit.tenant]


class Deadlines:
    """Deadlines of requests, in the order of time."""

    def __init__(self, queue_ttl_ms: int) -> None:
        self._queue_ttl_ms = queue_ttl_ms
        self._due: list[tuple[int, int, bool, SequenceGroup]] = []  # a heap
        self._clean_at = _CLEAN_AT

    def add(self, group: SequenceGroup) -> None:
        """Add the deadlines of an accepted group; it may have been admitted in an earlier epoch."""
        if len(self._due) >= self._clean_at:
            self._forget_ended()
        # Both times of the request are by its gateway's clock: only their difference is used.
        submit = group.submit
        accepted_ms = group.accepted_ms or submit.received_ms
        if submit.deadline_ms:
            until_ms = accepted_ms + submit.deadline_ms - submit.received_ms
            heappush(self._due, (until_ms, group.arrival, False, group))
        if self._queue_ttl_ms and not group.was_admitted:
            until_ms = accepted_ms + self._queue_ttl_ms
            heappush(self._due, (until_ms, group.arrival, True, group))

    def _forget_ended(self) -> None:
        """Drop the deadlines of ended requests, which are most of them."""
        self._due = [entry for entry in self._due if entry[3].state is not ENDED]
        heapify(self._due)
        self._clean_at = max(_CLEAN_AT, 2 * len(self._due))

    def has_passed(self, now_ms: int) -> bool:
        """Whether a deadline has passed."""
        return bool(self._due) and self._due[0][0] <= now_ms

    def passed(self, now_ms: int) -> Iterator[tuple[SequenceGroup, str]]:
        """Overdue groups, each with the reason. The caller ends each before it takes the next.

        Otherwise a request that has waited too long and is past its own deadline would end twice.
        """
        while self.has_passed(now_ms):
            _, _, while_waiting, group = heappop(self._due)
            if group.state is ENDED or (while_waiting and group.was_admitted):
                continue
            why = "it waited too long for its turn" if while_waiting else "its deadline has passed"
            yield group, why
