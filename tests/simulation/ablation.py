"""What each rule of the protocol is for: runs with one of them switched off.

    python -m tests.simulation.ablation --seeds 300

prints how many of the runs fail without each rule. The rules are those of docs/RECOVERY.md.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from gateway.engine.deliveries import Deliveries
from gateway.engine.events import Desynchronized, Event
from gpu_worker.service import WorkerService
from scheduler_svc import epoch as epochs
from scheduler_svc.core.requests.lifecycle import Requests
from scheduler_svc.core.requests.log_retention import Retention
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.outputs.history import History
from scheduler_svc.outputs.prompts_log import PromptsLog, read_prompts
from scheduler_svc.recovery import Recovery, resume
from scheduler_svc.service import SchedulerService
from shared.bus.api import START, Append, EntryId
from shared.codec import encode
from shared.messages.plans import EpochStarted
from shared.messages.requests import Attach
from shared.outputs_log.position import Continuity, LogPosition
from tests.simulation.deployment.server import Server
from tests.simulation.profile import Fault, Manner, Profile, Wish, request
from tests.simulation.scenes import large, small
from tests.simulation.simulate import Run, simulate

Rule = Callable[[ExitStack], None]
Circumstances = Callable[[Random], Profile]


def _stale_writers_are_heard(stack: ExitStack) -> None:
    """F1: ids are the server's, so that no writer is refused."""
    initialised = Server.__init__

    def start(self: Server, *args: Any) -> None:
        initialised(self, *args)
        self.accepts_all = True

    stack.enter_context(patch.object(Server, "__init__", start))


def _replayed_before_the_fence(stack: ExitStack) -> None:
    """F2: what is read is read first, and only then are earlier writers fenced off."""

    async def start_epoch(bus, keys, config, scheduler, workers, recorder, suspects=(), above=0):  # type: ignore[no-untyped-def]
        top = await bus.last_id(keys.outputs)
        recovery = Recovery(config.max_model_len)
        stored = await read_prompts(bus, keys.prompts, await bus.last_id(keys.prompts))
        left = await epochs.replay_until(bus, keys.outputs, top, recovery, 0, stored)
        tops = [await bus.last_id(keys.plans), await bus.last_id(keys.outputs)]
        number = max(await bus.now_ms(), above + 1, *(top.epoch + 1 for top in tops))
        fence = EntryId(number, 0)
        start = EpochStarted(number, scheduler, workers, np.array(suspects, np.int32))
        started = encode(start)
        recovery.apply(start)
        await bus.append_all(
            [
                Append(keys.plans, [started], number, 0, trim_below=fence),
                Append(keys.prompts, [started], number, 0),
                Append(keys.outputs, [started], number, 0),
            ]
        )
        core = Scheduler(config, recovery.requests_cursor)
        for state in resume(core, recovery, fence):
            await bus.append(Append(keys.outputs, [encode(state)], number))
        prompts = PromptsLog(keys, number, left.references)
        return epochs.Epoch(number, core, History(left.sizes), prompts)

    stack.enter_context(patch("scheduler_svc.service.start_epoch", start_epoch))


def _all_instances_are_named(stack: ExitStack) -> None:
    """F3: a worker takes part in every epoch that it reads of, whichever workers it names."""

    async def start(self: Any, started: EpochStarted) -> None:
        await self._leave_epoch()
        self._epoch = started.epoch

    take = WorkerService._process_entry

    async def take_any(self: Any, entry: Any, plans: Any) -> None:
        if self._epoch is None:
            self._epoch = entry.id.epoch
            self._step = max(0, entry.id.seq - 1)
        await take(self, entry, plans)

    stack.enter_context(patch.object(WorkerService, "_join_epoch", start))
    stack.enter_context(patch.object(WorkerService, "_process_entry", take_any))


def _states_are_not_compared(stack: ExitStack) -> None:
    """F4: a RequestState is appended wherever the log ends by then."""

    async def checkpoint(self: Any, started: epochs.Epoch, _: bool = False) -> None:
        if states := started.core.checkpoints():
            ids = await self._bus.append_all(started.prompts.split(states))
            started.prompts.appended(ids[-1])

    stack.enter_context(patch.object(SchedulerService, "_checkpoint", checkpoint))


def _trimming_forgets(stack: ExitStack) -> None:
    """F4: the log is trimmed without telling again what unfinished requests are."""

    def min_id(self: Any, head: EntryId) -> EntryId:
        count: int = self._num_entries
        return EntryId(head.epoch, head.seq - count) if head.seq >= count else START

    def overdue(self: Any, head: EntryId, _: bool = False) -> list[Any]:
        return list(self._requested.values())

    stack.enter_context(patch.object(Retention, "min_id", min_id))
    stack.enter_context(patch.object(Retention, "overdue", overdue))


def _the_log_wins(stack: ExitStack) -> None:
    """F5: an Attach is answered with what the log has, whatever the client has."""
    attach = Requests.attach

    def without_views(self: Requests, message: Attach) -> Any:
        plain = Attach(
            message.request_id, message.gateway, message.attachment, message.submit, (), False
        )
        return attach(self, plain)

    stack.enter_context(patch.object(Requests, "attach", without_views))


def _nobody_attaches_again(stack: ExitStack) -> None:
    """F5: a gateway that cannot follow the log any more waits for its next entry."""
    dispatch = Deliveries.dispatch

    def ignore(self: Deliveries, events: Iterable[Event]) -> None:
        dispatch(self, [event for event in events if not isinstance(event, Desynchronized)])

    stack.enter_context(patch.object(Deliveries, "dispatch", ignore))


def _gaps_are_ignored(stack: ExitStack) -> None:
    """F6: what comes next is taken for what comes next."""

    def take_step(self: Any, step: int) -> Continuity:
        self._step = step
        return Continuity.FOLLOWS

    enter = LogPosition.enter

    def enter_anyhow(self: LogPosition, epoch: int) -> Continuity:
        found = enter(self, epoch)
        return Continuity.FOLLOWS if found is Continuity.GAP else found

    def read(self: LogPosition, entry_id: EntryId) -> None:
        self.cursor = entry_id

    stack.enter_context(patch.object(LogPosition, "read", read))
    stack.enter_context(patch.object(LogPosition, "take_step", take_step))
    stack.enter_context(patch.object(LogPosition, "enter", enter_anyhow))


VIEWS = "F5 the client's view wins"
FENCE = "F2 fence, then replay"
RULES: Mapping[str, Rule] = {
    "F1 stale writers are refused": _stale_writers_are_heard,
    "F2 fence, then replay": _replayed_before_the_fence,
    "F3 only named instances act": _all_instances_are_named,
    "F4 RequestState is a compare-and-append": _states_are_not_compared,
    "F4 RequestState before trimming": _trimming_forgets,
    "F5 the client's view wins": _the_log_wins,
    "F5 Attach where the log is lost": _nobody_attaches_again,
    "F6 steps are dense": _gaps_are_ignored,
}


def _in(*faults: Fault, **changes: Any) -> Circumstances:
    """Small scenes with several faults of these kinds, soon one after the other."""

    def drawn(rng: Random) -> Profile:
        profile = small(rng)
        many = {"fault_rate": 0.03, "max_faults": 4, "repeat_rate": 0.0, **changes}
        from_s = min(wish.at_s for wish in profile.wishes)
        return replace(profile, faults=faults, faults_from_s=from_s, **many)

    return drawn


def _in_large(*faults: Fault, **changes: Any) -> Circumstances:
    """Scenes with many tokens, slow messages and several faults of these kinds."""

    def drawn(rng: Random) -> Profile:
        many = {"fault_rate": 0.015, "max_faults": 5, "latency_s": 0.02, **changes}
        return replace(large(rng), faults=faults, **many)

    return drawn


def _joined(rng: Random) -> Profile:
    """All is asked for again, as with one Idempotency-Key: the later clients have nothing yet."""
    profile = _in(Fault.CRASH, Fault.RIVAL, outputs_retention=10_000)(rng)
    span_s = 40 * profile.latency_s
    wishes = [replace(wish, manner=Manner.RESUME) for wish in profile.wishes if not wish.joins]
    twins = [
        replace(wish, at_s=wish.at_s + span_s * number / 4, joins=True)
        for wish in wishes
        for number in (1, 2)
    ]
    return replace(profile, wishes=[*wishes, *twins])


def _in_long(*faults: Fault, **changes: Any) -> Circumstances:
    """Scenes with faults of these kinds while something long is generated."""

    def drawn(rng: Random) -> Profile:
        at_s = 1.2
        wishes = [
            Wish(request(f"r{number}", [100 + number] * 3, 30), Manner.RESUME, at_s)
            for number in range(rng.choice((1, 2)))
        ]
        profile = Profile(
            wishes=wishes,
            faults=faults,
            fault_rate=0.005,
            max_faults=2,
            faults_from_s=at_s + rng.choice((0.03, 0.1, 0.2)),
            max_lost_writes=rng.choice((6, 12, 24)),
            restarts_s=(0.0, 0.01, 0.3),
        )
        return replace(profile, **changes)

    return drawn


# Other rules mend most of what the lack of one does: the runs are about what only this one does.
FOCUS: Mapping[str, Circumstances] = {
    "F1 stale writers are refused": _in_large(Fault.PAUSE, Fault.RIVAL),
    "F2 fence, then replay": _joined,
    "F3 only named instances act": _in(Fault.RIVAL, Fault.CRASH),
    "F4 RequestState is a compare-and-append": _in_large(*Fault),
    "F4 RequestState before trimming": _in_long(
        Fault.CRASH, Fault.MOVE, outputs_retention=3, fault_rate=0.02, max_faults=5
    ),
    "F5 the client's view wins": _in_long(Fault.TAIL_LOSS),
    "F5 Attach where the log is lost": _in(Fault.TAIL_LOSS, Fault.RESTART),
    "F6 steps are dense": _in_large(Fault.PAUSE, outputs_retention=3),
}


@contextmanager
def without(rule: str) -> Iterator[None]:
    """Runs inside do not follow the rule."""
    with ExitStack() as stack:
        RULES[rule](stack)
        yield


def failing(rule: str | None, seeds: Sequence[int], focus: str | None = None) -> list[Run]:
    """Those of the runs that fail without the rule.

    Args:
        focus: rule whose circumstances the runs have; by default the one that is switched off.
    """
    change = FOCUS[focus or rule or ""]
    with ExitStack() as stack:
        if rule is not None:
            stack.enter_context(without(rule))
        profiles = (change(Random(seed)) for seed in seeds)
        runs = [simulate(seed, found) for seed, found in zip(seeds, profiles, strict=True)]
        return [run for run in runs if run.failures]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=300)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    print("| switched off | fail without it | with it | for example |\n|---|---:|---:|---|")
    for rule in RULES:
        found, others = failing(rule, seeds), failing(None, seeds, rule)
        example = f"seed {found[0].seed}: {found[0].failures[0][:90]}" if found else ""
        print(f"| {rule} | {len(found)} of {len(seeds)} | {len(others)} | {example} |", flush=True)


if __name__ == "__main__":
    main()
