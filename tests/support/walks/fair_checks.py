"""Checks of the queues of a core that is fair between tenants."""

from collections import Counter

from scheduler_svc.core import events
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import GroupState
from tests.support.walks.core_checks import QueueCheck

_Rank = tuple[int, int]


class FairQueueCheck(QueueCheck):
    """The order of arrival counts among the requests of one tenant; between tenants, what runs."""

    def check(self, core: Scheduler, has_planned: bool) -> None:
        """Check the events, and that tenants have as much running as is counted for them."""
        super().check(core, has_planned)
        queues = core._planner.queues
        groups: Counter[str] = Counter()
        sequences: Counter[str] = Counter()
        decoding: Counter[str] = Counter()
        for group in queues.running:
            if not group.computes_prefix:
                tenant = group.submit.tenant
                groups[tenant] += 1
                sequences[tenant] += group.num_slots
                if group.state in (GroupState.DECODING, GroupState.SEARCHING):
                    decoding[tenant] += group.num_slots
        assert queues.tenants.num_running == sequences.total()
        for tenant, found in queues.tenants._tenants.items():
            counted = (found.num_groups, found.num_sequences, found.num_decoding)
            assert counted == (groups[tenant], sequences[tenant], decoding[tenant]), tenant
            assert found.num_requests >= found.num_groups
        limit = core.config.max_tenant_sequences
        assert not limit or max(sequences.values(), default=0) <= limit

    def _check_passing(self, request_id: str, earlier: set[_Rank], core: Scheduler) -> None:
        """No request passes an earlier one of its tenant, or a more urgent one, that would fit."""
        rank, slots = self._rank_of(request_id), self._slots_of(request_id, core)
        if rank in self._preempted:
            return
        mine = self._clients[request_id].submit.tenant
        tenants = core._planner.queues.tenants
        by_rank = {client.rank: name for name, client in self._clients.items()}
        for other in earlier & self._waiting:
            tenant = self._clients[by_rank[other]].submit.tenant
            wanted = self._slots_of(by_rank[other], core)
            limit = core.config.max_tenant_sequences
            if limit and tenant != mine and tenants.num_sequences(tenant) + wanted > limit:
                continue
            if tenant == mine:
                assert wanted > slots, f"{request_id} passes {other}, which needs {wanted} slots"
            elif not limit:  # else it may have been at its limit before others ended
                assert other[0] == rank[0], f"{request_id} {rank} passes {other}: more urgent"
        self.counts["fair passes"] += 1

    def _check_victim(self, event: events.Preempted, core: Scheduler) -> None:
        """The only group of a tenant is spared while another tenant has several."""
        rank = self._rank_of(event.request_id)
        running = Counter(self._tenant_at(other) for other in self._running)
        mine = self._clients[event.request_id].submit.tenant
        by = self._rank_of(event.by)
        if core.config.max_tenant_slowdown and running[mine] >= 1 and by[0] <= rank[0]:
            self.counts["shortened steps"] += self._clients[event.by].submit.tenant != mine
            return
        if by in self._waiting:
            assert running[mine] >= 1, f"{event.request_id} was the only group of its tenant"
            assert running[self._clients[event.by].submit.tenant] == 0
            assert by[0] <= rank[0]
            self.counts["displaced"] += 1
            return
        draining = {
            self._rank_of(group.request_id)
            for group in core._planner.queues.running
            if group.state is GroupState.FINISHING and not group.computes_prefix
        }
        others = self._running - draining
        assert not any(other[0] > rank[0] for other in others), "a less urgent one is spared"
        if running[mine] == 0:
            # Groups ranked before the one that grows may have got blocks in this step.
            grows = core._known.by_request[event.by].rank
            spared = {
                self._rank_of(group.request_id)
                for group in core._planner.queues.running
                if group.rank > grows and not group.computes_prefix
            } & others
            several = {
                other
                for other in spared
                if other[0] == rank[0] and running[self._tenant_at(other)] > 1
            }
            assert not several, f"{event.request_id} is preempted before {several}"

    def _give_up(self, event: events.PrefixGivenUp, ran_before: set[_Rank]) -> None:
        self.counts["prefixes given up"] += 1

    def _check_prefixes(self, core: Scheduler, has_victim: bool) -> None:
        """They may be computed while a tenant waits that has as much running as it may."""
        if not core.config.max_tenant_sequences and not core.config.max_tenant_slowdown:
            super()._check_prefixes(core, has_victim)

    def _tenant_at(self, rank: _Rank) -> str:
        return next(c.submit.tenant for c in self._clients.values() if c.rank == rank)
