"""The queues of waiting, running and preempted sequence groups."""

from bisect import bisect_left, insort
from operator import attrgetter

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequences.backlog import Backlog
from scheduler_svc.core.sequences.fair_queue import FairQueue
from scheduler_svc.core.sequences.sequence import (
    DECODING,
    ENDED,
    FINISHING,
    PREEMPTED,
    PREFILLING,
    SEARCHING,
    WAITING,
    GroupState,
    SequenceGroup,
)
from scheduler_svc.core.sequences.tenant_service import TenantService

BY_RANK = attrgetter("rank")


class Queues:
    """Groups by state and rank; each method moves a group from one state to the next.

    Attributes:
        running: groups that hold blocks.
        prefilling: those of them that have tokens which are in no plan yet.
        preempted: groups that lost their blocks.
        num_decoding: sequences that compute a token in every step.
        num_waiting: groups that were not admitted yet.
        num_beams: slots of running beam searches.
        backlog: load of requests that were never admitted.
        tenants: what each of them was served, and what runs.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.backlog = Backlog(config)
        self.running: list[SequenceGroup] = []
        self.prefilling: list[SequenceGroup] = []
        self.preempted: list[SequenceGroup] = []
        self.num_decoding = 0
        self.num_waiting = 0
        self.num_beams = 0
        self.tenants = TenantService(config.prompt_token_weight, config.generated_token_weight)
        self._waiting = FairQueue(config, self.tenants, self.preempted)
        self._rank_by_admission = config.fair_queueing
        self._num_admissions = 0

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of prompts that are in no plan yet; visits groups that compute theirs."""
        return self.backlog.num_tokens + sum(
            group.num_tokens - sequence.num_planned
            for group in self.prefilling
            for sequence in group.prefilled
        )

    def add_waiting(self, group: SequenceGroup) -> None:
        """Add a new group."""
        self.tenants.accept(group)
        self._add_waiting(group)

    def _add_waiting(self, group: SequenceGroup) -> None:
        self._waiting.add(group)
        self.num_waiting += 1
        if not group.computes_prefix:
            self.backlog.add(group.submit)

    def update_slots(self, group: SequenceGroup) -> None:
        """File a group again that may have another number of sequences than before."""
        if group.state is WAITING:
            self._waiting.add(group)

    def first_waiting(self, max_slots: int | None = None) -> SequenceGroup | None:
        """The next of the groups that were not admitted yet, see `FairQueue`.

        Args:
            max_slots: only of those that need no more slots than this.
        """
        return self._waiting.first(max_slots)

    def first_of_other_tenant(self, tenant: str) -> SequenceGroup | None:
        """The most urgent group of another tenant, waiting or running, None if there is none."""
        found = next((group for group in self.running if group.submit.tenant != tenant), None)
        waiting = self._waiting.first(without=tenant)
        if found is None or waiting is None:
            return found or waiting
        return waiting if waiting.submit.priority < found.submit.priority else found

    def admit(self, group: SequenceGroup) -> None:
        """Move a waiting or preempted group to the running ones: it has its blocks."""
        if group.state is WAITING:
            self.num_waiting -= 1
            self.backlog.remove(group.submit)
            if self._rank_by_admission and not group.computes_prefix:
                self._num_admissions += 1
                group.rank = (group.submit.priority, self._num_admissions)
        else:
            _remove(self.preempted, group)
        self.tenants.run(group)
        group.move_to(PREFILLING)
        if group.search is not None:
            self.num_beams += group.search.params.width
        _insert(self.running, group)
        _insert(self.prefilling, group)

    def prefilled(self, group: SequenceGroup, state: GroupState) -> None:
        """Move a group whose tokens are all planned to its next state."""
        _remove(self.prefilling, group)
        group.move_to(state)
        self.tenants.charge_generated(group, group.num_slots)  # its last chunk samples
        if state is DECODING:
            self._decode(group, len(group.sequences))
        elif state is SEARCHING:
            self.tenants.decode(group, group.num_slots)

    def finish(self, group: SequenceGroup) -> None:
        """Let a decoding group decode no more: its last possible token is planned."""
        group.move_to(FINISHING)
        self._decode(group, -len(group.sequences))

    def preempt(self, group: SequenceGroup) -> None:
        """Move a running group to the preempted ones."""
        self._stop_running(group)
        group.move_to(PREEMPTED)
        _insert(self.preempted, group)

    def requeue(self, group: SequenceGroup) -> None:
        """Move a running group back to the waiting ones."""
        self._stop_running(group)
        group.move_to(WAITING)
        self._add_waiting(group)

    def end(self, group: SequenceGroup) -> None:
        """End a group in any state."""
        if group.state is WAITING:
            self.num_waiting -= 1
            self.backlog.remove(group.submit)
        elif group.state is PREEMPTED:
            _remove(self.preempted, group)
        else:
            self._stop_running(group)
        self.tenants.end(group)
        group.move_to(ENDED)

    def end_sequence(self, group: SequenceGroup) -> None:
        """Count one sequence less of a group that has several."""
        if group.state is DECODING:
            self._decode(group, -1)
        if group.state not in (WAITING, PREEMPTED):
            self.tenants.end_sequence(group)

    def _stop_running(self, group: SequenceGroup) -> None:
        _remove(self.running, group)
        if group.search is not None:
            self.num_beams -= group.search.params.width
        if group.state is PREFILLING:
            _remove(self.prefilling, group)
        elif group.state is DECODING:
            self._decode(group, -len(group.sequences))
        elif group.state is SEARCHING:
            self.tenants.decode(group, -group.num_slots)
        self.tenants.stop_running(group)

    def _decode(self, group: SequenceGroup, num_sequences: int) -> None:
        """Let so many more, or fewer, sequences of a group compute a token in every step."""
        self.num_decoding += num_sequences
        self.tenants.decode(group, num_sequences)


def _insert(groups: list[SequenceGroup], group: SequenceGroup) -> None:
    if groups and group.rank < groups[-1].rank:
        insort(groups, group, key=BY_RANK)
    else:  # as nearly always: groups are admitted in the order of their arrival
        groups.append(group)


def _remove(groups: list[SequenceGroup], group: SequenceGroup) -> None:
    if groups[-1] is group:
        groups.pop()
        return
    index = bisect_left(groups, group.rank, key=BY_RANK)
    assert groups[index] is group, f"{group.request_id} is not at its rank"
    del groups[index]
