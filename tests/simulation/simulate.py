"""One run: everything that happens follows from the seed."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

from tests.simulation.deployment.determined import determined
from tests.simulation.deployment.loop import NothingLeft, VirtualLoop, current_party
from tests.simulation.deployment.world import Script, World
from tests.simulation.profile import Profile
from tests.simulation.scenes import draw

_END_S = 400.0  # by then every client must have been served
_SETTLE_S = 80.0  # by then what no client waits for must be gone


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run.

    Attributes:
        failures: what should not have been; empty if all is well.
        num_errors: streams that ended with an error, as they had to.
        order: 64-bit hash of whose callbacks ran, in their order.
        history: 64-bit hash of who wrote to which log, and of all faults, in their order.
    """

    seed: int
    failures: tuple[str, ...]
    num_faults: int
    num_errors: int
    num_callbacks: int
    virtual_s: float
    order: int
    history: int
    num_ranks: int

    @property
    def command(self) -> str:
        """Replays exactly this run."""
        ranks = f"--ranks {self.num_ranks} " if self.num_ranks > 1 else ""
        return f"python -m tests.simulation.run {ranks}--first {self.seed} --trace"


def simulate(
    seed: int,
    profile: Profile | None = None,
    script: Script | None = None,
    trace: Callable[[str], None] | None = None,
    inspect: Callable[[World], None] | None = None,
    num_ranks: int | None = None,
) -> Run:
    """Run a deployment until every client has been served.

    Args:
        seed: of all that is drawn.
        profile: instead of one that is drawn.
        script: faults instead of drawn ones.
        trace: takes a line for everything that happens.
        inspect: looks at the world in the end.
        num_ranks: of the engine, instead of the profile's.
    """
    rng = Random(seed)
    loop = VirtualLoop(rng)  # type: ignore[abstract]  # the services ask for no more
    with determined(is_silent=trace is None):
        profile = profile or draw(rng)
        if num_ranks is not None:
            profile = replace(profile, num_ranks=num_ranks)
        found = World(loop, rng, profile, trace, script)
        with _logged(found, trace is not None):
            try:
                loop.run_until_done(loop.create_task(_live(found)))
            except NothingLeft:
                found.failures.append("nothing will ever happen any more")
            finally:
                virtual_s, num_callbacks, order = loop.time(), loop.num_callbacks, loop.order
                _clear_away(loop, found)
    if inspect is not None:
        inspect(found)
    return Run(
        seed,
        tuple(found.failures),
        found.num_faults,
        sum(client.num_errors for client in found.clients),
        num_callbacks,
        virtual_s,
        order,
        found.history,
        profile.num_ranks,
    )


async def _live(world: World) -> None:
    world.start()
    try:
        async with asyncio.timeout(_END_S):
            await world.over.wait()
    except TimeoutError:
        waiting = [found.request_id for found in world.clients if not found.is_done]
        world.failures.append(f"never ended: {', '.join(waiting)}")
    world.failures += [client.fault for client in world.clients if client.fault]
    world.failures += [*_drawn_twice(world), *_told_apart(world)]
    world.is_quiet = True
    settled_s, pause_s = world.loop.time() + _SETTLE_S, world.profile.settle_s
    while not world.failures:
        await world.loop.sleep(pause_s)
        left = _what_is_left(world)
        if left is None:
            return
        if world.loop.time() > settled_s:
            world.failures.append(left)
        pause_s = min(2 * pause_s, 1.0)


def _drawn_twice(world: World) -> list[str]:
    """Requests of which more was generated than any client asked for, where nothing went wrong."""
    if world.num_faults or world.profile.repeat_rate or world.is_directed:
        return []
    found = []
    for submit in {client.request_id: client.wish.submit for client in world.clients}.values():
        wanted = submit.num_choices * submit.sampling.max_tokens
        # With log-probabilities, which the log does not keep, who joins begins anew.
        if submit.sampling.num_logprobs is None:
            drawn = world.model.num_drawn_after(tuple(submit.prompt.tolist()))
            if drawn > wanted:
                found.append(f"{submit.request_id}: {drawn} tokens were drawn, {wanted} wanted")
    return found


def _told_apart(world: World) -> list[str]:
    """Generations of which two clients that asked under the same key have different tokens."""
    found = []
    for one, other in itertools.combinations(world.clients, 2):
        if one.request_id != other.request_id or not world.allowances.must_agree(one):
            continue
        for ours, theirs in zip(one.tokens, other.tokens, strict=True):
            count = min(len(ours), len(theirs))
            if ours[:count] != theirs[:count]:
                found.append(f"{one.request_id}: {ours} to one client, {theirs} to another")
    return found


def _what_is_left(world: World) -> str | None:
    """What is held for no client, or not as it should be, if all is quiet again."""
    alive = [found for found in world.schedulers if found.party.is_running]
    if len(alive) != 1 or alive[0].watching.core is None or world.server.is_away:
        return "there is no scheduler"
    if leaving := [party.name for party in world.leaving if party.is_running]:
        return f"{', '.join(leaving)} was asked to leave and did not"
    core, watching = alive[0].watching.core, alive[0].watching
    num_used = core.pool.num_used - core.pool.num_pinned_unused
    if core.num_requests or num_used or core.host_pool.num_used:
        return (
            f"{core.num_requests} requests, {num_used} blocks and "
            f"{core.host_pool.num_used} host blocks are left"
        )
    if open_calls := [str(found) for found in world.gateways if found.num_left]:
        return f"{', '.join(open_calls)} waits for what no client wants"
    pinned = {status.prefix_id for status in core.prefixes()} | watching.given_up
    if missing := [p.name for p in world.profile.prefixes if p.prefix_id not in pinned]:
        return f"{', '.join(missing)} is not pinned"
    return None


def _clear_away(loop: VirtualLoop, world: World) -> None:
    """End all tasks, those of the dead too."""
    world.is_over = world.is_quiet = True
    for party in world.parties:
        party.is_dead = True
        party.thaw()
    world.meeting.close()
    loop.cancel_all()


class _ToTrace(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        party = current_party()
        fields = getattr(record, "fields", {})
        said = " ".join(f"{key}={value}" for key, value in fields.items())
        self._world.trace(f"{party and party.name}: {record.getMessage()} {said}")


@contextmanager
def _logged(world: World, is_wanted: bool) -> Iterator[None]:
    """What the services log stands in the trace."""
    if not is_wanted:
        yield
        return
    handler, before = _ToTrace(world), logging.root.level
    logging.root.addHandler(handler)
    logging.root.setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
        logging.root.setLevel(before)
