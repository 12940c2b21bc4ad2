"""One random walk: a scheduler core, the logs, a worker and clients, with events in any order.

A walk is a pure function of its seed and of the events that are kept, so that a failing one can be
repeated and shortened.
"""

import random
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.blocks.block_pool import BlockHash
from scheduler_svc.core.blocks.prefix_hashes import shared_hashes
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recovery import Recovery
from shared.bus.api import START, EntryId
from shared.codec import Message
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Abort, Stop
from shared.outputs_log.reader import OutputsReader
from tests.support.walks.clients import Client, check_ending
from tests.support.walks.core_checks import (
    QueueCheck,
    check_at_rest,
    check_cache,
    check_pins,
    check_pools,
    check_slots,
    check_tenants,
    tables_of,
)
from tests.support.walks.fair_checks import FairQueueCheck
from tests.support.walks.gateways import Gateways
from tests.support.walks.profile import Event, random_profile
from tests.support.walks.worker import WalkWorker


@dataclass(frozen=True)
class Entry:
    """One append to a log."""

    id: EntryId
    messages: tuple[Message, ...]
    behind: EntryId = START  # of a request: the entry of outputs that its gateway had read


class Walk:
    """Args:
    seed: of everything random.
    num_events: to draw; the walk then goes on until all requests have ended.
    """

    def __init__(self, seed: int, num_events: int) -> None:
        rng = random.Random(seed)
        self.profile = random_profile(rng)
        events, weights = list(self.profile.weights), list(self.profile.weights.values())
        kinds = rng.choices(events, weights, k=num_events)
        self._events = [(kind, rng.getrandbits(32)) for kind in kinds]
        self.counts: Counter[str] = Counter()
        self.clients: list[Client] = []
        self._gateways = Gateways(self.clients)
        self._prefixes: dict[
            bytes, Client
        ] = {}  # clients that compute pinned prefixes, by their tokens
        self._pinned: set[BlockHash] = set()  # all content that was ever to be pinned
        self._outputs: deque[Entry] = deque()
        self._requests: deque[Entry] = deque()
        self._num_requests = 0
        self._to_take_effect: list[tuple[EntryId, Client, int | None]] = []  # stops and aborts
        check = FairQueueCheck if self.profile.config.fair_queueing else QueueCheck
        self._queues = check(self._gateways.by_id)
        self._epoch = 0
        self._config = self.profile.config
        self._begin_epoch()

    def run(self, kept: Collection[int] | None = None) -> None:
        """Run all events, or those whose indices are kept, and then to the end.

        Raises:
            Exception: from the core, the worker or a check.
        """
        happen = {
            Event.SUBMIT: self._submit,
            Event.ABORT: self._abort,
            Event.STOP: self._stop,
            Event.TURN: self._turn,
            Event.EXECUTE: self._execute,
            Event.CHECKPOINT: self._checkpoint,
            Event.PIN: self._pin,
            Event.FAIL: self._fail,
        }
        for index, (kind, bits) in enumerate(self._events):
            if kept is None or index in kept:
                happen[kind](bits)
        self._finish()

    # ------------------------------------------------------------------ clients

    def _submit(self, bits: int) -> None:
        number = len(self.clients) + 1
        most_choices = self._config.max_num_sequences
        client = self.profile.client(number, random.Random(bits), most_choices)
        self._gateways.submit(client)
        self._append_request(client.submit)

    def _abort(self, bits: int) -> None:
        client = self._some_unfinished(bits)
        if client is not None:
            is_stale = bits % 5 == 0
            attachment = "stale" if is_stale else client.submit.attachment
            at = self._append_request(Abort(client.submit.request_id, attachment, "gone"))
            if not is_stale:
                client.is_aborted = True
                self._to_take_effect.append((at, client, None))
            self.counts["stale aborts" if is_stale else "aborts"] += 1

    def _stop(self, bits: int) -> None:
        client = self._some_unfinished(bits)
        if client is None:
            return
        if client.search is not None:
            self._append_request(Stop(client.submit.request_id, 0, 1))  # has no effect
            return
        for number, choice in enumerate(client.choices):
            if choice.output and not choice.reason:
                num_tokens = 1 + bits % len(choice.output)
                at = self._append_request(Stop(client.submit.request_id, number, num_tokens))
                self._to_take_effect.append((at, client, number))
                if choice.stopped_at is None:
                    choice.stopped_at = num_tokens
                self.counts["stops"] += 1
                return

    def _pin(self, bits: int) -> None:
        pin, computing = self.profile.prefix(bits)
        self._prefixes[computing.submit.prompt.tobytes()] = computing
        self._pinned.update(shared_hashes(pin.cache_salt, pin.tokens, self._config.block_size))
        self._append_request(pin)

    def _some_unfinished(self, bits: int) -> Client | None:
        found = [client for client in self.clients if not client.has_ended]
        return found[bits % len(found)] if found else None

    def _append_request(self, message: Message) -> EntryId:
        self._num_requests += 1
        entry = Entry(EntryId(1, self._num_requests), (message,), self._last_output)
        self._requests.append(entry)
        self._unread_requests.append(entry)
        return entry.id

    # ---------------------------------------------------------------- the services

    def _turn(self, bits: int) -> None:
        """Read some or all new entries, plan several times, append."""
        core = self.core
        all_outputs, all_requests, all_plans = bits & 1, bits & 2, bits & 12
        answers: list[Message] = []
        while self._unread_outputs:
            entry = self._unread_outputs.popleft()
            for message in entry.messages:
                answers += core.apply(message, entry.id)
            if not all_outputs:
                break
        # Logs are read together: with a request, all entries that its gateway had read are read.
        while self._unread_requests and self._unread_requests[0].behind <= core.outputs_cursor:
            entry = self._unread_requests.popleft()
            for message in entry.messages:
                answers += core.apply(message, entry.id)
            if not all_requests:
                break
        self._queues.check(core, has_planned=False)
        planned: list[tuple[StepPlan, dict[int, list[int]]]] = []
        while (plan := core.schedule(0)) is not None:
            self._queues.check(core, has_planned=True)
            planned.append((plan, self._checked(plan)))
            if not all_plans:
                break
        self._queues.check(core, has_planned=True)
        if answers:
            self._append_output(answers)
        self._plans += planned
        assert core.planned_step - core.applied_step <= self._config.max_plans_in_flight
        self._check_effects()

    def _checked(self, plan: StepPlan) -> dict[int, list[int]]:
        """The tables behind a new plan; checks the invariants after it."""
        core = self.core
        self.counts["steps"] += 1
        self.counts["copies"] += len(plan.copy_sources)
        self.counts["swaps in"] += len(plan.swap_in_device)
        self.counts["forks"] += len(plan.fork_children)
        for beam in plan.beams:
            self.counts["beam steps"] += 1
            if len(beam.parents):
                self.counts["beam forks"] += int(np.count_nonzero(beam.parents != beam.handles))
        # Sequences that leave free less room than any waiting one needs, so that a block of the
        # host pool is never reused within a plan.
        assert not len(plan.swap_out_host) or not len(plan.swap_in_host), "swaps both ways"
        for admission in plan.admissions:
            if admission.sampling.seed == 0:
                self._gateways.ignore(admission.handle)
                self.counts["admissions of prefixes"] += 1
        if plan.step % 4 == 0:  # a violation persists, so that every fourth step is enough
            check_pools(core)
        if plan.step % 8 == 0:
            check_cache(core.pool)
            check_cache(core.host_pool)
            check_slots(core)
            check_pins(core)
            num_common = check_tenants(core, self._pinned)
            if not core.config.tenants_share_prefixes:
                self.counts["pinned blocks of several tenants"] += num_common
            self._queues.check_stats(core)
        return tables_of(core)

    def _execute(self, bits: int) -> None:
        """Execute the next plan, or all plans."""
        while self._plans:
            plan, tables = self._plans.popleft()
            result = self.worker.execute(plan, tables)
            trim_below = EntryId.parse(plan.outputs_min_id)
            self._append_output([result])
            while self._outputs[0].id < trim_below:
                self._outputs.popleft()
                self.counts["trimmed entries"] += 1
            if bits & 1:
                break

    def _checkpoint(self, _bits: int) -> None:
        """Restate requests; the messages must be right behind what was read, or have no effect."""
        if not self._unread_outputs and (states := self.core.checkpoints()):
            self._append_output(states)
            self.counts["checkpoints"] += 1

    def _fail(self, bits: int) -> None:
        """Lose worker and scheduler, and with them plans, and results that were not appended."""
        self.counts["failures"] += 1
        if self.profile.pool_may_change:
            num_blocks = self.profile.config.num_blocks
            num_blocks = max(1, num_blocks // 2 + bits % (num_blocks + 1))
            self._config = replace(
                self.profile.config,
                num_blocks=num_blocks,
                max_pinned_blocks=min(self.profile.config.max_pinned_blocks, num_blocks // 2),
                max_plans_in_flight=1 + bits % 4,
            )
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Fence the log, replay it, and recover."""
        self._epoch += 1
        config = self._config
        self._plans: deque[tuple[StepPlan, dict[int, list[int]]]] = deque()
        self._gateways.begin_epoch(config)
        fence = EntryId(self._epoch, 0)
        self._outputs.append(Entry(fence, (EpochStarted(self._epoch, "scheduler", ("worker",)),)))
        recovery, reader = Recovery(self._config.max_model_len), OutputsReader()
        for entry in self._outputs:
            for message in entry.messages:
                for event in reader.read_message(entry.id, message):
                    recovery.apply(event)
        self._gateways.check_recovery(recovery)
        self.worker = WalkWorker(
            self.clients,
            self._prefixes,
            config.num_blocks,
            config.block_size,
            config.max_num_batched_tokens,
            self._config.max_model_len,
        )
        self.core = Scheduler(config, recovery.requests_cursor)
        self.core.outputs_cursor = self._last_output = fence
        self._unread_outputs: deque[Entry] = deque()
        self._unread_requests = deque(
            entry for entry in self._requests if entry.id > recovery.requests_cursor
        )
        self._queues.forget()
        answers: list[Message] = []
        for request in recovery.in_order():
            if request.search is not None and request.search.done:
                self.counts["searches over when recovered"] += 1
            elif request.search is not None and request.search.length:
                self.counts["searches recovered"] += 1
                self.counts["finished beams recovered"] += len(request.search.hypotheses())
            answers += self.core.recover(
                request.submit, request.outputs(), request.ended, request.search
            )
        self._queues.check(self.core, has_planned=False)
        if answers:
            self._append_output(answers)

    # ------------------------------------------------------------------- the log

    def _append_output(self, messages: Sequence[Message]) -> None:
        self._last_output = EntryId(self._epoch, self._last_output.seq + 1)
        entry = Entry(self._last_output, tuple(messages))
        self._outputs.append(entry)
        self._unread_outputs.append(entry)
        for message in messages:
            cursor = self._gateways.follow(message)
            while self._requests and self._requests[0].id <= cursor:
                self._requests.popleft()

    def _check_effects(self) -> None:
        """Check that stops and aborts that the scheduler has read have ended what they name."""
        left = []
        for at, client, number in self._to_take_effect:
            if at > self.core.requests_cursor:
                left.append((at, client, number))
            elif number is None:
                assert client.has_ended, f"{client.submit.request_id} was aborted"
            else:
                assert client.choices[number].reason, f"{client.where(number)} was stopped"
        self._to_take_effect = left

    # ------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """No request starves: without new arrivals all end in a bounded number of steps."""
        bound = self._most_steps_left()
        first = self.counts["steps"]
        everything = 0b1111
        while True:
            before = self.counts["steps"]
            self._turn(everything)
            self._execute(bits=0)
            if self.counts["steps"] == before and not self._unread_outputs:
                break
            assert self.counts["steps"] - first <= bound, f"more than {bound} steps to the end"
        self.counts["tightness"] = 100 * (self.counts["steps"] - first) // bound
        for client in self.clients:
            assert client.has_ended, f"{client.submit.request_id} never ended"
            check_ending(client)
        assert not self._to_take_effect
        check_pools(self.core)
        check_cache(self.core.pool)
        self._queues.check_stats(self.core)
        check_cache(self.core.host_pool)
        check_slots(self.core)
        check_pins(self.core)
        check_at_rest(self.core)
        self._count()

    def _most_steps_left(self) -> int:
        """Steps for every request alone, token by token, once more for each later one."""
        left = [
            (len(client.submit.prompt) + client.max_output) * len(client.choices)
            for client in self.clients
            if not client.has_ended
        ]
        prefixes = sum(len(client.submit.prompt) for client in self._prefixes.values())
        return 50 + 2 * sum(left) + prefixes

    def _count(self) -> None:
        self.counts["requests"] = len(self.clients)
        self.counts["refused"] = sum(client.is_refused for client in self.clients)
        self.counts.update(self._queues.counts)
        for client in self.clients:
            for choice in client.choices:
                self.counts[f"ended by {choice.reason}"] += 1
