"""Groups of ranks: a step is computed when all of them have come to it, or it never is."""

from collections.abc import Callable
from concurrent import futures
from typing import Any

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.ranks.member import GroupOver, Member
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan
from tests.simulation.deployment.loop import Party, Turn, VirtualLoop
from tests.simulation.deployment.model import Model, ModelExecutor

_DEADLINE_S = 6.0  # of a collective
_POLL_S = 0.01


class Draws:
    """What rank 0 has drawn in a step; the other ranks draw the same, or differ."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._drawn: list[tuple[tuple[int, ...], tuple[int, bool]]] = []
        self._at: int | None = None  # of the next draw to repeat; None: they are new

    def begin(self, rank: int) -> None:
        """A rank computes the step; rank 0 is the first."""
        if rank == 0:
            self._drawn.clear()
        self._at = None if rank == 0 else 0

    def draw(self, before: tuple[int, ...]) -> tuple[int, bool]:
        """A token, and whether it ends the sequence."""
        if self._at is None:
            self._drawn.append((before, self._model.draw(before)))
            return self._drawn[-1][1]
        expected, found = self._drawn[self._at]
        assert expected == before, f"ranks draw for {expected} and {before}"
        self._at += 1
        return found

    def logprob(self, token: int) -> float:
        return self._model.logprob(token)


class RankExecutor(ModelExecutor):
    """What one rank executes plans with."""

    def __init__(self, draws: Draws, rank: int, max_num_batched_tokens: int) -> None:
        self.draws = draws
        self.rank = rank
        self.refusal: str | None = None  # why the group is over
        self.refuses_plan = False
        super().__init__(draws, max_num_batched_tokens)  # type: ignore[arg-type]

    def execute(self, plan: StepPlan) -> StepResult:
        if self.refuses_plan:
            raise PlanRefused("a block cannot be mapped")
        if self.refusal is not None:
            raise GroupOver(self.refusal)
        self.draws.begin(self.rank)
        return super().execute(plan)


class _Waiting:
    """A rank that has come to a step."""

    def __init__(self, plan: StepPlan, compute: Callable[[], None], until_s: float) -> None:
        self.plan = plan
        self.compute = compute
        self.until_s = until_s


class Group:
    """Some ranks that have met, and their collectives."""

    def __init__(self, loop: VirtualLoop, model: Model, num_ranks: int, tokens: int) -> None:
        self.joined: dict[int, Party] = {}
        self.num_steps = 0
        self.num_ranks = num_ranks
        self._loop = loop
        draws = Draws(model)
        self.executors = [RankExecutor(draws, rank, tokens) for rank in range(num_ranks)]
        self._waiting: list[list[_Waiting]] = [[] for _ in range(num_ranks)]
        self._of_dead: list[_Waiting] = []
        self._is_polled = False

    def is_complete(self) -> bool:
        if any(party.is_dead for party in self.joined.values()):
            raise GroupOver("a rank of the group is gone")
        return len(self.joined) == self.num_ranks

    def come(self, rank: int, plan: StepPlan, compute: Callable[[], None]) -> None:
        """A rank's thread begins a step."""
        if self.executors[rank].refusal is not None:
            compute()
            return
        until_s = self._loop.time() + _DEADLINE_S
        self._waiting[rank].append(_Waiting(plan, compute, until_s))
        if not self._is_polled:
            self._poll()

    def close(self) -> None:
        """The run has ended."""
        self._end("the run has ended")
        for waiting in (*self._waiting, self._of_dead):
            while waiting:
                waiting.pop(0).compute()

    def _poll(self) -> None:
        self._is_polled = any(self._waiting)
        if not self._is_polled:
            return
        if not any(party.is_frozen and not party.is_dead for party in self.joined.values()):
            self._advance()
        self._expire()
        turn = Turn(self._poll, (), self.joined[0].context.copy())
        turn.context.run(_of_no_party, self._loop, turn)

    def _advance(self) -> None:
        while all(self._waiting):
            heads = [waiting[0] for waiting in self._waiting]
            if any(party.is_dead for party in self.joined.values()):
                self._end("a rank has died")
            elif any(executor.refuses_plan for executor in self.executors):
                self._end("a rank has refused a plan")
            elif len({(head.plan.step, head.plan.now_ms) for head in heads}) > 1:
                self._end("ranks compute different steps")
            self.num_steps += 1
            for waiting in self._waiting:
                waiting.pop(0).compute()

    def _expire(self) -> None:
        for rank, waiting in enumerate(self._waiting):
            party = self.joined[rank]
            if party.is_dead:
                self._of_dead += waiting
                waiting.clear()
            died = any(each.is_dead for each in self.joined.values())
            if waiting and not party.is_frozen and (died or waiting[0].until_s < self._loop.time()):
                self._end("a rank has not come in time")
                while waiting:
                    waiting.pop(0).compute()

    def _end(self, reason: str) -> None:
        for executor in self.executors:
            executor.refusal = reason


def _of_no_party(loop: VirtualLoop, turn: Turn) -> None:
    from tests.simulation.deployment.loop import _PARTY

    _PARTY.set(None)
    loop.push(loop.time() + _POLL_S, turn)


class RankThread(futures.Executor):
    """The thread that computes steps of a rank: it waits there for the other ranks."""

    def __init__(self, group: Group, member: Member, party: Party) -> None:
        self._group = group
        self._rank = member.rank
        self._party = party

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "futures.Future[Any]":
        context = self._party.context.copy()
        self._group.come(self._rank, args[0], lambda: context.run(fn, *args))
        return futures.Future()


class Meeting:
    """Where the ranks of a deployment find each other: a rendezvous by name of the group."""

    def __init__(self, make: Callable[[], Group]) -> None:
        self.groups: dict[str, Group] = {}
        self._make = make

    def of(self, party: Party, rank: int) -> "_Rendezvous":
        return _Rendezvous(self, party, rank)

    def close(self) -> None:
        for group in self.groups.values():
            group.close()

    def make(self, name: str) -> Group:
        self.groups[name] = self._make()
        return self.groups[name]


class _Rendezvous:
    def __init__(self, meeting: Meeting, party: Party, rank: int) -> None:
        self._meeting = meeting
        self._party = party
        self._rank = rank

    def open(self, group: str) -> tuple[str, Group]:
        found = self._meeting.make(group)
        found.joined[0] = self._party
        return f"store-of-{self._party.name}", found

    def join(self, group: str, address: str) -> Group:
        found = self._meeting.groups[group]
        assert address == f"store-of-{found.joined[0].name}"
        if self._rank in found.joined:
            raise GroupOver(f"group {group} has rank {self._rank}")
        found.joined[self._rank] = self._party
        return found
