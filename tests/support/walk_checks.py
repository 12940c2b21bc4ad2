"""What must hold in the scheduler core at every moment of a random walk.

These checks look inside: a leak that no client ever notices is still a leak.
"""

from collections.abc import Sequence
from itertools import chain

from scheduler_svc.core import notes
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import GroupState
from tests.support.walk_clients import Client


def tables_of(core: Scheduler) -> dict[int, list[int]]:
    """Block tables by handle, of all sequences that have blocks."""
    sequences = (sequence for _, sequence in core._requests._by_handle.values())
    return {found.handle: list(found.block_table) for found in sequences if found.block_table}


def check_pools(core: Scheduler) -> None:
    """Reference counts are those of the tables."""
    sequences = [sequence for _, sequence in core._requests._by_handle.values()]
    _check_references(core.pool, [found.block_table for found in sequences])
    if core.config.num_host_blocks:
        _check_references(core.host_pool, [found.host_table for found in sequences])


def _check_references(pool: BlockPool, tables: Sequence[list[int]]) -> None:
    counts = [0] * pool.num_blocks
    for block in chain.from_iterable(tables):
        counts[block] += 1
    assert pool._references == counts, f"references {pool._references}, tables have {counts}"
    num_nobodys = counts.count(0)
    assert pool.num_free == num_nobodys, f"{pool.num_free} are free, {num_nobodys} are nobody's"
    assert pool.num_used == pool.num_blocks - num_nobodys


def check_cache(pool: BlockPool) -> None:
    """Every block is in one place; what is cached is findable, what is free is not."""
    idle = sorted([*pool._free, *pool._cached])
    nobodys = [block for block, count in enumerate(pool._references) if count == 0]
    assert idle == nobodys, f"blocks {idle} are free, {nobodys} are nobody's"
    assert {block: name for name, block in pool._block_of.items()} == pool._hash_of
    assert pool._cached.keys() <= pool._hash_of.keys(), "a cached block has no hash"
    assert not pool._hash_of.keys() & set(pool._free), "a free block has a hash"


def check_at_rest(core: Scheduler) -> None:
    """Every request has ended, and nothing is left of any."""
    assert core.pool.num_used == core.host_pool.num_used == 0
    assert core.config.prefix_caching or core.pool.num_cached == 0
    assert not core._requests._by_request
    assert not core._requests._by_handle
    queues = core._stepping.queues
    assert queues.first_waiting() is None
    assert [queues.preempted, queues.prefilling, queues.running] == [[], [], []]
    assert queues.num_waiting == queues.num_decoding == queues.num_beams == 0
    assert not core._retention._oldest_first, "the log is held back for a request that has ended"
    assert core._stepping._tokens.num_free_slots == core.config.max_num_sequences
    assert not core._stepping._tokens._slot_of
    assert min(core._stepping._opens_block, default=core.planned_step + 1) > core.planned_step
    assert min(core._stepping._reaches_limit, default=core.planned_step) >= core.planned_step
    assert min(core._stepping._samples_first, default=core.applied_step + 1) > core.applied_step


class QueueCheck:
    """Follows a core's notes: who comes next, who has to go, and that nobody is forgotten.

    Args:
        clients: by request id.
    """

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients
        self._waiting: set[tuple[int, int]] = set()  # ranks
        self._running: set[tuple[int, int]] = set()
        self._preempted: set[tuple[int, int]] = set()
        self.num_preempted = {"recompute": 0, "swap": 0}
        self.num_reused = 0  # tokens of admissions
        self.num_admitted = 0

    def forget(self) -> None:
        """A new core has empty queues."""
        for ranks in (self._waiting, self._running, self._preempted):
            ranks.clear()

    def check(self, core: Scheduler, has_planned: bool) -> None:
        """Take what the core has noted since, in order.

        Args:
            has_planned: whether it did so in ``schedule``.
        """
        for note in core.take_notes():
            rank = self._clients[note.request_id].rank
            match note:
                case notes.Accepted():
                    self._waiting.add(rank)
                case notes.Admitted():
                    self._admit(note, rank)
                case notes.Preempted():
                    self._preempt(note, rank)
                    if has_planned:
                        self._check_victim(note, rank, core)
                    else:
                        # One of its choices ended while they were computed again.
                        assert note.by == note.request_id
                case notes.Ended():
                    for ranks in (self._waiting, self._running, self._preempted):
                        ranks.discard(rank)

    def check_stats(self, core: Scheduler) -> None:
        """What the core says of its queues."""
        stats = core.stats()
        assert stats.num_running == len(self._running)
        assert stats.num_waiting == len(self._waiting) + len(self._preempted)
        assert 0 <= stats.num_kv_tokens <= stats.num_used_blocks * core.config.block_size
        assert stats.num_shared_blocks >= 0
        assert stats.num_used_blocks == core.pool.num_used

    def _admit(self, note: notes.Admitted, rank: tuple[int, int]) -> None:
        """The earliest of those that were preempted, or, if there are none, of those that wait."""
        queue = self._preempted or self._waiting
        assert rank in queue, f"{note.request_id} is admitted while {self._preempted} come first"
        assert rank == min(queue), f"{note.request_id} {rank} is admitted before {min(queue)}"
        queue.remove(rank)
        self._running.add(rank)
        self.num_admitted += 1
        self.num_reused += note.num_reused
        sampling = self._clients[note.request_id].submit.sampling
        assert note.again or sampling.num_prompt_logprobs is None or note.num_reused == 0

    def _preempt(self, note: notes.Preempted, rank: tuple[int, int]) -> None:
        assert rank in self._running, f"{note.request_id} is preempted but does not run"
        self._running.remove(rank)
        self._preempted.add(rank)
        self.num_preempted[note.kind] += 1

    def _check_victim(self, note: notes.Preempted, rank: tuple[int, int], core: Scheduler) -> None:
        """The latest goes first, but for those that will be gone soon anyway."""
        assert self._clients[note.by].rank <= rank, f"{note.request_id} goes for a later one"
        draining = {
            self._clients[group.request_id].rank
            for group in core._stepping.queues.running
            if group.state is GroupState.DRAINING
        }
        spared = {other for other in self._running if other > rank} - draining
        assert not spared, f"{note.request_id} {rank} is preempted before {spared}"
