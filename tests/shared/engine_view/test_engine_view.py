"""The view of an engine beside the scheduler core whose logs it follows."""

import json
import random
from base64 import b64decode
from itertools import count

import numpy as np
import pytest

from scheduler_svc.core.blocks.block_pool import BlockPool
from scheduler_svc.core.events import Admitted
from scheduler_svc.core.sequences.sequence import WAITING
from shared.bus.api import Entry, EntryId
from shared.engine_view.frames import CACHED, PREFIX, FrameSource, blocks_of, counts_of
from shared.engine_view.log_follower import LogFollower
from shared.messages.requests import Abort, Stop, Submit
from shared.messages.snapshots import RequestPhase
from shared.sampling import BeamParams, EarlyStopping
from tests.support.requests import submit
from tests.support.viewed_engine import ViewedEngine


class Follower(LogFollower):
    """Reads what is new in an engine's logs."""

    def __init__(self, engine: ViewedEngine, begins: bool = True) -> None:
        self.numbers: dict[str, int] = {}
        fresh = count(1)
        super().__init__(lambda name: self.numbers.setdefault(name, next(fresh)))
        self.engine = engine
        self.cursors = (EntryId(0, 0), EntryId(0, 0), EntryId(0, 0))
        if begins:
            entry = engine.snapshot()
            cursors = self.begin(entry)
            assert cursors is not None
            self.cursors = (*cursors, entry.id)

    def follow(self) -> None:
        logs = (self.engine.plans, self.engine.outputs, self.engine.snapshots)
        found = [[e for e in log if e.id > at] for log, at in zip(logs, self.cursors, strict=True)]
        self.read(*found)
        self.cursors = tuple(  # type: ignore[assignment]
            log[-1].id if log else at for log, at in zip(logs, self.cursors, strict=True)
        )


def asked(rng: random.Random, number: int) -> Submit:
    """A request: often with a beginning that others have, with choices, or with beams."""
    prompt = [7] * 8 if rng.random() < 0.4 else []
    prompt += [rng.randrange(1, 90) for _ in range(rng.randrange(1, 16))]
    beams = BeamParams(2, 1.0, EarlyStopping.ESTIMATED) if rng.random() < 0.15 else None
    num_choices = 2 if beams else rng.choice([1, 1, 1, 2, 3])
    max_tokens = rng.randrange(1, 24)
    return submit(f"r{number}", prompt, 0, num_choices, max_tokens=max_tokens, beams=beams)


def check_equal(follower: Follower) -> None:
    """Compare block tables, their contents, and the phases of requests with the core's."""
    core, view = follower.engine.core, follower.view
    assert view is not None
    for group in core.running:
        for sequence in group.sequences:
            if not sequence.block_table:
                continue
            if sequence.handle not in view.sequences:
                # A fork of this step's last chunk, or a beam whose plan comes next.
                assert group.search is not None
                continue
            found = view.sequences[sequence.handle]
            assert found.table.tolist() == sequence.block_table, sequence.handle
            if group.search is None:
                tokens = group.kv_tokens_at(core.planned_step, sequence)
                assert found.num_kv_tokens(view.step) == tokens, group.state
    if core._tables.retired:
        return  # the next plan shows what has lost its blocks since
    stats = core.stats()
    hosts = view.host_owners
    if not any(found.search and found.hosts for found in view.requests.values()):
        assert np.count_nonzero(hosts) == len(hosts) - core.host_pool.num_free
    running = view.phases[RequestPhase.PREFILL] + view.phases[RequestPhase.DECODE]
    assert running == stats.num_running
    waiting = sum(group.state is WAITING for group in core._known.by_request.values())
    assert view.phases[RequestPhase.WAITING] == waiting
    assert view.phases[RequestPhase.SWAPPED] == stats.num_swapped
    for request in view.requests.values():
        if request.end or (group := core.find(request.request_id)) is None:
            assert request.phase is RequestPhase.ENDED


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(4))
def test_the_view_of_plans_and_outputs_equals_the_state_of_the_core(
    seed: int, preemption: str
) -> None:
    rng = random.Random(seed)
    engine = ViewedEngine(preemption=preemption)
    follower = Follower(engine)
    late: Follower | None = None
    num_preempted = 0
    for number in range(60):
        if number < 45:
            engine.ask(asked(rng, number))
        if rng.random() < 0.15:
            engine.ask(Abort(f"r{rng.randrange(number + 1)}", "attachment", "its client left"))
        if rng.random() < 0.1:
            engine.ask(Stop(f"r{rng.randrange(number + 1)}", 0, 1))
        for _ in range(rng.randrange(4)):
            engine.step()
        follower.follow()
        check_equal(follower)
        if number == 30:
            late = Follower(engine)  # begins in the middle
        elif late is not None:
            late.follow()
            check_equal(late)
        view = follower.view
        assert view is not None
        num_preempted = max(num_preempted, view.phases[RequestPhase.SWAPPED])
    while engine.step():
        follower.follow()
        check_equal(follower)
    assert follower.view is not None
    assert follower.view.num_marks > 45
    kinds = {mark.kind.value for mark in follower.view.marks}
    assert ("swapped" if preemption == "swap" else "preempted") in kinds


class CountedReuse:
    """What the core says of its prefix cache while a random load runs: the view's counts beside it.

    Args:
        has_snapshots: whether the follower reads one before each plan.
    """

    def __init__(self, seed: int, preemption: str, has_beams: bool, has_snapshots: bool) -> None:
        rng = random.Random(seed)
        self.engine = ViewedEngine(preemption=preemption)
        self.num_evicted = self.num_reused_tokens = 0
        self._count_evictions(self.engine.core._tables.pool)
        follower = Follower(self.engine)
        for number in range(60):
            message = asked(rng, number)
            if number < 45 and (has_beams or message.sampling.beams is None):
                self.engine.ask(message)
            for _ in range(rng.randrange(4) if number < 59 else 500):
                if has_snapshots:
                    self.engine.snapshot()
                    follower.follow()
                if not self.engine.step():
                    break
                follower.follow()
                found = self.engine.core.take_events()
                self.num_reused_tokens += sum(
                    one.num_reused for one in found if isinstance(one, Admitted)
                )
        assert follower.view is not None
        assert self.engine.core.num_requests == 0
        self.view = follower.view

    def _count_evictions(self, pool: BlockPool) -> None:
        evict = pool._evict

        def counted(count: int) -> None:
            self.num_evicted += count
            evict(count)

        pool._evict = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(3))
def test_found_and_evicted_blocks_equal_those_of_the_core(seed: int) -> None:
    counted = CountedReuse(seed, "recompute", has_beams=False, has_snapshots=False)
    reuse = counted.view.reuse
    assert reuse.num_evicted == counted.num_evicted > 100
    assert reuse.num_hits * counted.engine.config.block_size == counted.num_reused_tokens > 100


def test_evicted_blocks_are_nearly_those_of_the_core_with_beams_and_swaps() -> None:
    counted = CountedReuse(1, "swap", has_beams=True, has_snapshots=True)
    assert counted.view.reuse.num_evicted == pytest.approx(counted.num_evicted, rel=0.05)
    swapped_in = [mark for mark in counted.view.marks if mark.kind == "readmitted"]
    assert swapped_in
    hits = counted.view.reuse.num_hits * counted.engine.config.block_size
    assert 0 < hits < counted.num_reused_tokens, "what was swapped in was not found"


def test_a_frame_has_the_blocks_that_were_evicted_not_those_that_were_found() -> None:
    engine = ViewedEngine(num_blocks=4)
    follower, source = Follower(engine), FrameSource()
    assert follower.view is not None
    source.advance(follower.view)

    def served(name: str, prompt: list[int]) -> tuple[list[int], list[int]]:
        engine.ask(submit(name, prompt, max_tokens=1))
        while engine.step():
            pass
        follower.follow()
        assert follower.view is not None
        frame = json.loads(source.advance(follower.view) or "{}")
        return json.loads(source.snapshot())["counts"][-2:], frame.get("evicted", [])

    assert served("a", [1] * 9) == ([0, 0], [])
    cached = engine.core._tables.pool.cached_blocks()
    assert len(cached) == 2
    assert served("b", [1] * 9) == ([2, 0], [])
    assert served("c", [2] * 13) == ([2, 2], sorted(cached))


def test_nothing_is_evicted_where_nothing_is_cached() -> None:
    engine = ViewedEngine(num_blocks=4, prefix_caching=False)
    follower = Follower(engine)
    for number in range(3):
        engine.ask(submit(f"r{number}", [number + 1] * 9, max_tokens=1))
        while engine.step():
            pass
    follower.follow()
    assert follower.view is not None
    assert (follower.view.reuse.num_hits, follower.view.reuse.num_evicted) == (0, 0)


def test_counts_at_rest_equal_the_gauges_once_a_snapshot_is_read() -> None:
    engine = ViewedEngine()
    follower = Follower(engine)
    for number in range(4):
        engine.ask(submit(f"r{number}", [5] * 9 + [number], max_tokens=9))
        engine.step()
    follower.follow()
    assert follower.view is not None
    blocks = blocks_of(follower.view, None)
    assert np.count_nonzero(blocks.kinds == PREFIX) == 2, "two full blocks are shared"
    check_gauges(follower)
    while engine.step():
        pass
    engine.snapshot()
    follower.follow()
    check_gauges(follower)
    blocks = blocks_of(follower.view, None)
    assert np.count_nonzero(blocks.kinds == CACHED) == engine.core.stats().num_cached_blocks > 0


def check_gauges(follower: Follower) -> None:
    assert follower.view is not None
    counts = counts_of(follower.view, blocks_of(follower.view, None))
    stats = follower.engine.core.stats()
    num_blocks = follower.engine.config.num_blocks
    free = num_blocks - stats.num_used_blocks - stats.num_cached_blocks
    assert counts[:4] == [stats.num_used_blocks, stats.num_cached_blocks, 0, free]
    assert counts[4:6] == [stats.num_shared_blocks, stats.num_kv_tokens]


def test_differences_that_are_applied_to_a_snapshot_give_the_next_one() -> None:
    rng = random.Random(5)
    engine = ViewedEngine(preemption="swap")
    follower, source = Follower(engine), FrameSource()
    assert follower.view is not None
    shown = source.advance(follower.view)
    assert shown is not None
    state = arrays_of(shown)
    for number in range(30):
        engine.ask(asked(rng, number))
        engine.step()
        follower.follow()
        text = source.advance(follower.view)
        if text is None:
            continue
        frame = json.loads(text)
        if "blocks" in frame:
            where, *values = frame["blocks"]
            for name, found in zip(list(TYPES)[:5], values, strict=True):
                state[name][where] = found
        for name in ("filled", "hosts"):
            if name in frame:
                state[name][frame[name][0]] = frame[name][1]
        now = arrays_of(source.snapshot())
        assert all((state[name] == now[name]).all() for name in state)
        assert len(text) < 6_000
    assert source.advance(follower.view) is None, "nothing has changed"


TYPES = {"owners": "<i4", "columns": "<i4", "references": "<u2", "filled": "<u2", "kinds": "<u1"}
TYPES["hosts"] = "<i4"


def arrays_of(snapshot: str) -> dict[str, np.ndarray]:
    found = json.loads(snapshot)
    return {
        name: np.frombuffer(b64decode(found[name]), dtype).copy() for name, dtype in TYPES.items()
    }


def test_a_preemption_is_explained_in_the_words_of_the_policy() -> None:
    engine = ViewedEngine(num_blocks=6, num_host_blocks=0)
    follower = Follower(engine)
    engine.ask(submit("a", [1] * 8, max_tokens=12), submit("b", [2] * 8, max_tokens=12))
    while engine.step():
        pass
    follower.follow()
    assert follower.view is not None
    texts = [mark.text for mark in follower.view.marks if mark.kind == "preempted"]
    assert len(texts) == 1
    assert "#2 lost 3 blocks" in texts[0]
    assert "#1 needed a block, 0 were free, and #2 is the last running request by rank" in texts[0]
    assert "they are recomputed: the host pool has 0 free blocks" in texts[0]


def test_a_new_epoch_is_marked_and_what_it_recovers_goes_on() -> None:
    engine = ViewedEngine()
    follower = Follower(engine)
    engine.ask(submit("a", [1] * 8, max_tokens=30))
    for _ in range(3):
        engine.step()
    follower.follow()
    after = ViewedEngine(2_000)
    after.ask(submit("a", [1] * 8, max_tokens=30))
    follower.engine, follower.cursors = after, (EntryId(0, 0), EntryId(0, 0), EntryId(0, 0))
    after.step()
    after.snapshot()
    after.step()
    follower.follow()
    assert follower.view is not None
    assert [mark.kind.value for mark in follower.view.marks][-2:] == ["epoch", "recovered"]
    assert follower.view.epoch == 2_000
    check_equal(follower)


def test_a_gap_in_the_plans_is_waited_out_until_a_snapshot() -> None:
    engine = ViewedEngine()
    follower = Follower(engine)
    engine.ask(submit("a", [1] * 8, max_tokens=30))
    for _ in range(4):
        engine.step()
    del engine.plans[2]
    follower.follow()
    assert follower.view is not None
    assert follower.view.step < engine.core.planned_step
    engine.step()
    engine.snapshot()
    follower.follow()
    check_equal(follower)


def test_entries_that_cannot_be_decoded_do_not_end_the_reader() -> None:
    engine = ViewedEngine()
    follower = Follower(engine, begins=False)
    broken = [Entry(EntryId(1_000, n), (b"\x00nonsense",)) for n in range(3)]
    follower.read(broken, broken, broken)
    assert follower.view is None
    assert follower.begin(broken[0]) is None
