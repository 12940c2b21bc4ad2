"""Faults at chosen places instead of drawn ones."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.deployment.loop import Party
from tests.simulation.deployment.world import World
from tests.simulation.profile import Fault

Action = Callable[[World, Party], Fault | None]


@dataclass(slots=True)
class Cue:
    """At the n-th such command of a role, something happens.

    Attributes:
        when: "before" the command reaches the server, or "after" that, before the reply.
        what: is part of the command.
    """

    role: str
    when: str
    what: str
    number: int
    action: Action


class Directed:
    """Cues that come one after the other; each counts from when the one before came.

    Attributes:
        cues: those that have not come yet.
    """

    def __init__(self, *cues: Cue) -> None:
        self.cues = list(cues)
        self._count = 0

    def __call__(self, world: World, party: Party, when: str, what: str) -> Fault | None:
        if not self.cues:
            return None
        cue = self.cues[0]
        if party.name.partition("-")[0] != cue.role or when != cue.when or cue.what not in what:
            return None
        self._count += 1
        if self._count < cue.number:
            return None
        self._count = 0
        del self.cues[0]
        return cue.action(world, party)


def scheduler_of(world: World) -> Party:
    """The one that was started last."""
    return world.schedulers[-1].party


def crash(restart_s: float = 0.01) -> Action:
    """Of whose command it is."""
    return lambda world, party: world.crash(party, restart_s)


def pause(seconds: float) -> Action:
    """Of whose command it is."""
    return lambda world, party: world.pause(party, seconds)


def rank_of(world: World, number: int) -> Party:
    """The process of another rank than 0 that was started last."""
    return [found for found in world.parties if found.role == f"rank{number}"][-1]


def crash_rank(number: int, restart_s: float = 0.01) -> Action:
    return lambda world, _: world.crash(rank_of(world, number), restart_s)


def pause_rank(number: int, seconds: float) -> Action:
    return lambda world, _: world.pause(rank_of(world, number), seconds)


def refuse_at_rank(number: int) -> Action:
    """Its next plan: as if a block could not be mapped."""

    def act(world: World, _: Party) -> None:
        groups = list(world.meeting.groups.values())
        groups[-1].executors[number].refuses_plan = True

    return act


def crash_scheduler(restart_s: float = 0.01) -> Action:
    return lambda world, _: world.crash(scheduler_of(world), restart_s)


def crash_gateways(restart_s: float = 0.01) -> Action:
    def act(world: World, _: Party) -> None:
        for gateway in world.gateways:
            world.crash(gateway.party, restart_s)

    return act


def wake_worker(world: World, _: Party) -> None:
    """The one that was started last."""
    worker = [found for found in world.parties if found.role == "worker"][-1]
    if not worker.is_dead:
        worker.thaw()


def lose_tail(num_lost: int, seconds: float = 0.2) -> Action:
    """The server restarts without so many writes, or without any if there are fewer."""
    return lambda world, _: world.restart_server(min(num_lost, world.server.num_writes), seconds)


def delete(log: str) -> Action:
    """Of a log, or of everything: ""."""
    return lambda world, _: world.delete(log)


def forget_last_of(log: str) -> Action:
    """The server restarts without the last append to a log; it is back before a reader sees it."""

    def act(world: World, _: Party) -> None:
        world.restart_server(world.server.num_writes_from_last(log), 0.0)
        world.server.come_back()

    return act


def move_clients(world: World, _: Party) -> None:
    """The connections of all clients break."""
    for client in world.clients:
        if client.is_served:
            client.move(num_kept=0)


def lose_reply(_: World, __: Party) -> Fault:
    """The command was carried out, and its sender does not know."""
    return Fault.LOST_REPLY


def also(*actions: Action) -> Action:
    """All of them at once."""

    def act(world: World, party: Party) -> None:
        for action in actions:
            action(world, party)

    return act
