"""Invariants of the scheduler core at every step of a random walk.

These checks look inside the core, because a leak may have no visible effect.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from itertools import chain

import numpy as np

from scheduler_svc.core import events
from scheduler_svc.core.blocks.block_pool import BlockHash, BlockPool
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import GroupState, Sequence, SequenceGroup
from shared.messages.leases import PrefixState
from tests.support.walks.clients import Client


def tables_of(core: Scheduler) -> dict[int, list[int]]:
    """Block tables by handle, of all sequences that have blocks."""
    return {
        sequence.handle: list(sequence.block_table)
        for sequence in _sequences_of(core)
        if sequence.block_table
    }


def check_pools(core: Scheduler) -> None:
    """Check that reference counts are those of the tables and of pinned blocks."""
    sequences = _sequences_of(core)
    _check_references(core.pool, [found.block_table for found in sequences])
    if core.config.num_host_blocks:
        _check_references(core.host_pool, [found.host_table for found in sequences])


def _sequences_of(core: Scheduler) -> list[Sequence]:
    return [sequence for group in core._known.by_request.values() for sequence in group.sequences]


def _check_references(pool: BlockPool, tables: Iterable[list[int]]) -> None:
    counts = [0] * pool.num_blocks
    for block in chain(*tables, pool._pinned):
        counts[block] += 1
    assert pool._references == counts, f"references {pool._references}, tables have {counts}"
    num_unused = counts.count(0)
    assert pool.num_free == num_unused, f"{pool.num_free} are free, {num_unused} have no references"
    assert pool.num_used == pool.num_blocks - num_unused


def check_cache(pool: BlockPool) -> None:
    """Check that every block is in one place, cached ones can be found, and free ones cannot."""
    idle = sorted([*pool._free, *pool._cached])
    unused = [block for block, count in enumerate(pool._references) if count == 0]
    assert idle == unused, f"blocks {idle} are free, {unused} have no references"
    named = {block: name for block, name in enumerate(pool._hash_of) if name is not None}
    assert {block: name for name, block in pool._block_of.items()} == named
    assert pool._cached.keys() <= named.keys(), "a cached block has no hash"
    assert not named.keys() & set(pool._free), "a free block has a hash"


def check_slots(core: Scheduler) -> None:
    """Check that the beams that searches may come to have fit into a step."""
    searches = [group.search for group in core._planner.queues.running if group.search is not None]
    num_beams = sum(search.params.width for search in searches)
    assert core._planner.queues.num_beams == num_beams
    assert core._planner._tokens.num_free_slots >= num_beams, "searches have slots that others took"
    handles = {
        sequence.handle
        for group in core._known.by_request.values()
        if group.search is None
        for sequence in group.sequences
    }
    assert core._known.by_handle.keys() == handles
    assert core._planner._tokens._slot_of.keys() <= handles


def check_pins(core: Scheduler) -> None:
    """Check that exactly the prefixes' blocks are pinned, within the limit."""
    pool, prefixes = core.pool, core._prefixes
    num_pins = Counter(chain.from_iterable(found.hashes for found in prefixes._pinned.values()))
    assert pool._num_pins == num_pins
    found = {pool._block_of[name] for name in num_pins if name in pool._block_of}
    assert pool._pinned == found, f"{pool._pinned} are pinned, {found} should be"
    assert len(num_pins) <= core.config.max_pinned_blocks
    for prefix_id, prefix in prefixes._pinned.items():
        if prefix.is_computed:
            assert len(pool.find(prefix.hashes)) == len(prefix.hashes), f"{prefix_id} is lost"
        else:
            assert core._known.by_request[prefix_id].computes_prefix, (
                f"no group computes {prefix_id}"
            )


def check_tenants(core: Scheduler, pinned: Collection[BlockHash]) -> int:
    """Check that tenants share no block except pinned ones; how many of those they have.

    Args:
        pinned: names of all content that was ever to be pinned.
    """
    tenants: defaultdict[int, set[str]] = defaultdict(set)  # by block
    for group in core._known.by_request.values():
        if not group.computes_prefix:
            for sequence in group.sequences:
                for block in sequence.block_table:
                    tenants[block].add(group.submit.tenant)
    common = [block for block, found in tenants.items() if len(found) > 1]
    if not core.config.tenants_share_prefixes:
        for block in common:
            name = core.pool._hash_of[block]
            assert name in pinned, f"{sorted(tenants[block])} share a block that is not pinned"
    return len(common)


def check_at_rest(core: Scheduler) -> None:
    """Check that every request has ended, and left nothing behind."""
    assert core.host_pool.num_used == 0
    assert core.pool.num_used == core.pool.num_pinned
    assert all(status.state != PrefixState.PENDING for status in core.prefixes())
    assert core.config.prefix_caching or core.pool.num_cached == 0
    assert not core._known.by_request
    assert not core._known.by_handle
    queues = core._planner.queues
    assert queues.first_waiting() is None
    assert [queues.preempted, queues.prefilling, queues.running] == [[], [], []]
    assert queues.num_waiting == queues.num_decoding == queues.num_beams == 0
    assert not core._retention._oldest_first, "the log is held back for a request that has ended"
    assert core._planner._tokens.num_free_slots == core.config.max_num_sequences
    assert not core._planner._tokens._slot_of
    assert min(core._planner.blocks._opens_block, default=core.planned_step + 1) > core.planned_step
    assert not len(core._planner._reaches_limit), "what has ended is remembered for its limit"
    assert min(core._planner._samples_first, default=core.applied_step + 1) > core.applied_step


class QueueCheck:
    """Follows a core's events: checks admissions, victims, and that no request is forgotten.

    Args:
        clients: by request id.

    Attributes:
        counts: events, by kind.
    """

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients
        self._waiting: set[tuple[int, int]] = set()  # ranks
        self._running: set[tuple[int, int]] = set()
        self._preempted: set[tuple[int, int]] = set()
        self._passed: dict[tuple[int, int], int] = {}  # ranks, and the step from which on
        self._prefix_arrivals: set[int] = set()  # of admitted groups
        self.counts: Counter[str] = Counter()

    def forget(self) -> None:
        """Start with the empty queues of a new core."""
        for ranks in (self._waiting, self._running, self._preempted):
            ranks.clear()
        self._passed.clear()
        self._prefix_arrivals.clear()

    def check(self, core: Scheduler, has_planned: bool) -> None:
        """Check the core's events since the last call, in order.

        Args:
            has_planned: whether they come from ``schedule``.
        """
        taken = core.take_events()
        ran_before = set(self._running) if taken else set()
        has_victim = False
        for event in taken:
            match event:
                case events.Accepted():
                    self._waiting.add(self._rank_of(event.request_id))
                case events.Admitted():
                    self._admit(event, core)
                case events.Preempted():
                    self._preempt(event)
                    has_victim |= has_planned
                    if has_planned:
                        self._check_victim(event, core)
                    else:
                        # One of its choices ended while its tokens were recomputed.
                        assert event.by == event.request_id
                case events.Ended():
                    for ranks in (self._waiting, self._running, self._preempted):
                        ranks.discard(self._rank_of(event.request_id))
                case events.PrefixPinned():
                    self.counts["prefixes pinned"] += 1
                case events.PrefixRefused():
                    self.counts["prefixes refused"] += 1
                case events.PrefixGivenUp():
                    assert has_planned, f"{event.prefix_id} is given up for no plan"
                    self._give_up(event, ran_before)
        if has_planned and len(core._prefixes):
            self._check_prefixes(core, has_victim)

    def check_stats(self, core: Scheduler) -> None:
        """Check the core's own statistics of its queues."""
        stats = core.stats()
        groups = _groups_of_prefixes(core)
        num_admitted = sum(group.state is not GroupState.WAITING for group in groups)
        num_waiting = len(groups) - num_admitted
        assert stats.num_running == len(self._running) + num_admitted
        assert stats.num_waiting == len(self._waiting) + len(self._preempted) + num_waiting
        assert 0 <= stats.num_kv_tokens <= stats.num_used_blocks * core.config.block_size
        assert stats.num_shared_blocks >= 0
        pool = core.pool
        num_unused = sum(pool._references[block] == 1 for block in pool._pinned)
        assert stats.num_used_blocks == pool.num_used - num_unused

    def _rank_of(self, request_id: str) -> tuple[int, int]:
        return self._clients[request_id].rank

    def _admit(self, event: events.Admitted, core: Scheduler) -> None:
        """The first by rank of the preempted and the waiting requests, or one that may pass it."""
        rank = self._rank_of(event.request_id)
        assert rank in self._preempted | self._waiting, f"{event.request_id} does not wait"
        earlier = {other for other in self._preempted | self._waiting if other < rank}
        if earlier:
            self._check_passing(event.request_id, earlier, core)
        self._preempted.discard(rank)
        self._waiting.discard(rank)
        self._running.add(rank)
        self.counts["admissions"] += 1
        self.counts["reused tokens"] += event.num_reused
        submit = self._clients[event.request_id].submit
        if submit.sampling.num_prompt_logprobs is not None:
            assert event.again or event.num_reused == 0
            return
        for found in core._prefixes._pinned.values():
            prefix = found.pin.tokens[: len(found.hashes) * core.config.block_size]
            is_longer = len(submit.prompt) > len(prefix)
            if found.is_computed and is_longer and found.pin.cache_salt == submit.cache_salt:
                begins_with_it = np.array_equal(submit.prompt[: len(prefix)], prefix)
                assert event.num_reused >= len(prefix) or not begins_with_it
                self.counts["admissions behind prefixes"] += begins_with_it

    def _check_passing(
        self, request_id: str, earlier: set[tuple[int, int]], core: Scheduler
    ) -> None:
        """A request was admitted before these: they lack slots, and for not too long."""
        rank, slots = self._rank_of(request_id), self._slots_of(request_id, core)
        assert not earlier & self._preempted, f"{request_id} passes {earlier & self._preempted}"
        by_rank = {client.rank: name for name, client in self._clients.items()}
        first = min(earlier)
        # While slots are kept for the first, no new group is admitted; preempted ones are.
        passed = {first} if rank in self._preempted else earlier
        for other in passed:
            wanted = self._slots_of(by_rank[other], core)
            assert wanted > slots, f"{request_id} passes {other}, which needs {wanted} slots"
        if rank in self._preempted:
            self.counts["preempted ones that pass"] += 1
            return
        assert first[0] == rank[0], f"{request_id} {rank} passes {first}, which is more urgent"
        since = self._passed.setdefault(first, core.planned_step)
        num_steps = core.planned_step - since
        assert num_steps < core.config.max_passing_steps, f"{first} is passed for {num_steps} steps"
        self.counts["passes"] += 1

    def _slots_of(self, request_id: str, core: Scheduler) -> int:
        return core._known.by_request[request_id].num_slots

    def _preempt(self, event: events.Preempted) -> None:
        rank = self._rank_of(event.request_id)
        assert rank in self._running, f"{event.request_id} is preempted but does not run"
        self._running.remove(rank)
        self._preempted.add(rank)
        self.counts[f"preempted by {event.kind}"] += 1
        if self._clients[event.request_id].search is not None:
            self.counts[f"searches preempted by {event.kind}"] += 1

    def _check_victim(self, event: events.Preempted, core: Scheduler) -> None:
        """The latest is preempted first, except those that will end soon anyway."""
        rank = self._rank_of(event.request_id)
        assert self._rank_of(event.by) <= rank, f"{event.request_id} goes for a later one"
        draining = {
            self._rank_of(group.request_id)
            for group in core._planner.queues.running
            if group.state is GroupState.FINISHING and not group.computes_prefix
        }
        spared = {other for other in self._running if other > rank} - draining
        assert not spared, f"{event.request_id} {rank} is preempted before {spared}"

    def _give_up(self, event: events.PrefixGivenUp, ran_before: set[tuple[int, int]]) -> None:
        """Only for the earliest running group, or if none runs."""
        first = min(ran_before, default=None)
        rank = self._rank_of(event.by)
        assert first is None or rank <= first, f"{event.prefix_id} goes for {rank}, not {first}"
        self.counts["prefixes given up"] += 1

    def _check_prefixes(self, core: Scheduler, has_victim: bool) -> None:
        """Requests that compute prefixes stand behind all clients'."""
        admitted = [
            group for group in _groups_of_prefixes(core) if group.state is not GroupState.WAITING
        ]
        arrivals = {group.arrival for group in admitted}
        if arrivals - self._prefix_arrivals:
            others = self._waiting | self._preempted
            assert not others, f"a prefix is computed while {others} wait"
        if has_victim and self._preempted:
            spared = [group for group in admitted if group.state is GroupState.PREFILLING]
            assert not spared, f"{self._preempted} had to go, a prefix is computed"
        self._prefix_arrivals = arrivals


def _groups_of_prefixes(core: Scheduler) -> list[SequenceGroup]:
    """Requests that compute prefixes."""
    prefix_ids = core._prefixes._pinned
    return [
        core._known.by_request[found] for found in prefix_ids if found in core._known.by_request
    ]
