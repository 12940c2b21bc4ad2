"""Groups that wait for their first admission, of all tenants."""

from collections.abc import Sequence

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.tenant_service import TenantService
from scheduler_svc.core.sequences.waiting_queue import WaitingQueue

_Order = tuple[int, float, tuple[int, int]]  # priority, counter of the tenant, rank


class FairQueue:
    """A queue for each tenant.

    The first group is the one of the lowest priority number; of equal ones, that of the tenant
    that was served least; of its groups, the first by rank. A tenant with as many running
    sequences as it may have is passed over. Without fairness all tenants share one queue.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        service: TenantService,
        preempted: Sequence[SequenceGroup],
    ) -> None:
        self._is_fair = config.fair_queueing
        self._max_sequences = config.max_tenant_sequences
        self._service = service
        self._preempted = preempted  # will run again
        self._by_tenant: dict[str, WaitingQueue] = {}

    def __len__(self) -> int:
        """Number of entries; some of their groups may have ended."""
        return sum(map(len, self._by_tenant.values()))

    def add(self, group: SequenceGroup) -> None:
        """Add a group that is new here, or needs another number of slots than before."""
        tenant = group.submit.tenant if self._is_fair or self._max_sequences else ""
        self._by_tenant.setdefault(tenant, WaitingQueue()).add(group)

    def first(
        self, max_slots: int | None = None, without: str | None = None
    ) -> SequenceGroup | None:
        """The first group, None if there is none. Visits each tenant with waiting groups.

        Args:
            max_slots: only of the groups that need no more slots than this.
            without: a tenant whose groups do not count.
        """
        if not self._by_tenant:
            return None  # as in most steps
        best: tuple[_Order, SequenceGroup] | None = None
        for tenant in list(self._by_tenant):
            group = self._first_of(tenant, max_slots)
            if group is None or tenant == without:
                continue
            served = self._service.counter(tenant) if self._is_fair else 0.0
            order = (group.submit.priority, served, group.rank)
            if best is None or order < best[0]:
                best = order, group
        return None if best is None else best[1]

    def _first_of(self, tenant: str, max_slots: int | None) -> SequenceGroup | None:
        queue = self._by_tenant[tenant]
        first = queue.first()
        if first is None:
            del self._by_tenant[tenant]
            return None
        if self._max_sequences:
            # Not a narrower one instead: the first would wait as long as they come.
            num_admitted = self._service.num_sequences(tenant) + sum(
                group.num_slots for group in self._preempted if group.submit.tenant == tenant
            )
            if num_admitted + first.num_slots > self._max_sequences:
                return None
        return first if max_slots is None else queue.first(max_slots)
