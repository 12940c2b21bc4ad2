"""Where every unfinished sequence group stands."""

from bisect import bisect_left, insort
from operator import attrgetter

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequences.backlog import Backlog
from scheduler_svc.core.sequences.sequence import (
    DECODING,
    ENDED,
    FINISHING,
    PREEMPTED,
    PREFILLING,
    WAITING,
    GroupState,
    SequenceGroup,
)
from scheduler_svc.core.sequences.waiting_queue import WaitingQueue

BY_RANK = attrgetter("rank")


class Queues:
    """Groups by state, each state by rank; the methods are the ways from one to the next.

    Attributes:
        running: all that hold blocks, earliest first.
        prefilling: of those, the ones that have tokens which are in no plan yet.
        preempted: those that wait to get their blocks back.
        num_decoding: sequences that compute a token in every plan.
        num_waiting: groups that were not admitted yet.
        num_beams: that groups with blocks have at most.
        backlog: what has never been admitted.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.backlog = Backlog(config)
        self.running: list[SequenceGroup] = []
        self.prefilling: list[SequenceGroup] = []
        self.preempted: list[SequenceGroup] = []
        self.num_decoding = 0
        self.num_waiting = 0
        self.num_beams = 0
        self._waiting = WaitingQueue()

    def add_waiting(self, group: SequenceGroup) -> None:
        """A new group."""
        self._waiting.add(group)
        self.num_waiting += 1
        if not group.computes_prefix:
            self.backlog.add(group.submit)

    def update_slots(self, group: SequenceGroup) -> None:
        """A group may have more or fewer sequences than before."""
        if group.state is WAITING:
            self._waiting.add(group)

    def first_waiting(self, max_slots: int | None = None) -> SequenceGroup | None:
        """The first by rank of the groups that were not admitted yet.

        Args:
            max_slots: only of those that need no more slots than this.
        """
        return self._waiting.first(max_slots)

    def admit(self, group: SequenceGroup) -> None:
        """A group that was next has got its blocks."""
        if group.state is WAITING:
            self.num_waiting -= 1
            self.backlog.remove(group.submit)
        else:
            _remove(self.preempted, group)
        group.move_to(PREFILLING)
        if group.search is not None:
            self.num_beams += group.search.params.width
        _insert(self.running, group)
        _insert(self.prefilling, group)

    def prefilled(self, group: SequenceGroup, state: GroupState) -> None:
        """All of a group's tokens are planned; it goes on in this state."""
        _remove(self.prefilling, group)
        group.move_to(state)
        if state is DECODING:
            self.num_decoding += len(group.sequences)

    def finish(self, group: SequenceGroup) -> None:
        """A decoding group's last possible token is planned."""
        group.move_to(FINISHING)
        self.num_decoding -= len(group.sequences)

    def preempt(self, group: SequenceGroup) -> None:
        """A running group loses its blocks."""
        self._stop_running(group)
        group.move_to(PREEMPTED)
        _insert(self.preempted, group)

    def requeue(self, group: SequenceGroup) -> None:
        """A running group goes back to where it came from."""
        self._stop_running(group)
        group.move_to(WAITING)
        self.add_waiting(group)

    def end(self, group: SequenceGroup) -> None:
        """A group is done, whatever it was doing."""
        if group.state is WAITING:
            self.num_waiting -= 1
            self.backlog.remove(group.submit)
        elif group.state is PREEMPTED:
            _remove(self.preempted, group)
        else:
            self._stop_running(group)
        group.move_to(ENDED)

    def end_sequence(self, group: SequenceGroup) -> None:
        """One of several sequences of a group is done."""
        if group.state is DECODING:
            self.num_decoding -= 1

    def _stop_running(self, group: SequenceGroup) -> None:
        _remove(self.running, group)
        if group.search is not None:
            self.num_beams -= group.search.params.width
        if group.state is PREFILLING:
            _remove(self.prefilling, group)
        elif group.state is DECODING:
            self.num_decoding -= len(group.sequences)


def _insert(groups: list[SequenceGroup], group: SequenceGroup) -> None:
    if groups and group.rank < groups[-1].rank:
        insort(groups, group, key=BY_RANK)
    else:  # as nearly always: who was admitted before arrived before
        groups.append(group)


def _remove(groups: list[SequenceGroup], group: SequenceGroup) -> None:
    if groups[-1] is group:
        groups.pop()
        return
    index = bisect_left(groups, group.rank, key=BY_RANK)
    assert groups[index] is group, f"{group.request_id} is not where its rank says"
    del groups[index]
