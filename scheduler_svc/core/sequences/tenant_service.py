"""Virtual token counters: the service that each tenant has received, in weighted tokens.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A tenant's counter grows with
the prompt tokens that are computed for it, and with the tokens that are generated for it. Waiting
requests of the tenant with the lowest counter are served first. A tenant that comes back after a
pause starts at the lowest counter of the others: it cannot save up service.

Tokens found in the prefix cache cost nothing. Tokens that are recomputed after a preemption cost
the tenant nothing either.
"""

from dataclasses import dataclass

from scheduler_svc.core.sequences.sequence import SequenceGroup

_FORGET_AT = 1_024  # tenants; beyond that, those that would start at the floor are dropped
_PRESENT_STEPS = 64  # for which a tenant without requests may come back at any time


@dataclass(slots=True)
class _Tenant:
    served: float  # weighted tokens up to ``since_step``
    since_step: int
    num_decoding: int = 0  # sequences, each of which generates a token in every step
    num_requests: int = 0  # that have not ended
    last_step: int = 0  # in which it had requests, while it has none
    num_groups: int = 0  # that hold blocks
    num_sequences: int = 0  # of those


class TenantService:
    """The counters, and what each tenant has running.

    Counters of tenants with decoding sequences grow with the number of steps, so that a step in
    which nothing changes costs nothing here.

    Args:
        prompt_weight: cost of a computed prompt token.
        generated_weight: cost of a generated token.

    Attributes:
        step: the one that is planned.
        num_running: sequences of all groups that hold blocks.
    """

    def __init__(self, prompt_weight: float, generated_weight: float) -> None:
        self.step = 0
        self.num_running = 0
        self._prompt_weight = prompt_weight
        self._generated_weight = generated_weight
        self._tenants: dict[str, _Tenant] = {}
        self._floor = 0.0  # where a tenant starts if no other has requests
        self._forget_at = _FORGET_AT
        self._demand: tuple[int, int] | None = None  # None: it may have changed
        self._demand_until = 0  # step

    def counter(self, tenant: str) -> float:
        """Weighted tokens that a tenant was served; of unknown tenants, where they would start."""
        found = self._tenants.get(tenant)
        return self._floor if found is None else self._counter(found)

    def num_groups(self, tenant: str) -> int:
        """Groups of a tenant that hold blocks."""
        found = self._tenants.get(tenant)
        return 0 if found is None else found.num_groups

    def num_sequences(self, tenant: str) -> int:
        """Sequences of the groups of a tenant that hold blocks."""
        found = self._tenants.get(tenant)
        return 0 if found is None else found.num_sequences

    @property
    def num_active(self) -> int:
        """Tenants with requests that have not ended."""
        return sum(found.num_requests > 0 for found in self._tenants.values())

    def busiest(self, least_groups: int = 1) -> str | None:
        """The tenant with most running sequences, None if nothing runs.

        Args:
            least_groups: running groups that it must have.
        """
        found = [name for name, one in self._tenants.items() if one.num_groups >= least_groups]
        return max(found, key=self.num_sequences, default=None)

    def demand(self) -> tuple[int, int]:
        """Tenants that have requests or had some lately, and the requests of the one with fewest.

        A tenant that had some lately counts as one with one request: what others leave to it does
        not change with each of its requests.
        """
        if self._demand is None or self.step >= self._demand_until:
            self._demand, self._demand_until = self._count_demand()
        return self._demand

    def _count_demand(self) -> tuple[tuple[int, int], int]:
        """The demand, and the step in which it changes if no request comes or ends."""
        num_tenants, fewest, until = 0, 0, self.step + _PRESENT_STEPS
        for found in self._tenants.values():
            if not found.num_requests:
                if found.last_step <= self.step - _PRESENT_STEPS:
                    continue
                until = min(until, found.last_step + _PRESENT_STEPS)
            num_requests = max(1, found.num_requests)
            fewest = min(fewest, num_requests) if num_tenants else num_requests
            num_tenants += 1
        return (num_tenants, fewest), until

    # ------------------------------------------------------------ requests

    def accept(self, group: SequenceGroup) -> None:
        """Count a request that was accepted."""
        if group.computes_prefix:
            return
        name = group.submit.tenant
        found = self._tenants.get(name)
        if found is None:
            if len(self._tenants) >= self._forget_at:
                self._forget()
            found = self._tenants[name] = _Tenant(self._floor, self.step)
        if found.num_requests == 0:
            self._raise_floor()
            self._settle(found)
            found.served = max(found.served, self._floor)
        found.num_requests += 1
        self._demand = None

    def end(self, group: SequenceGroup) -> None:
        """Count a request no more."""
        if group.computes_prefix:
            return
        found = self._tenants[group.submit.tenant]
        found.num_requests -= 1
        found.last_step = self.step
        self._demand = None
        if found.num_requests == 0:
            self._raise_floor()
            if not self.num_active:
                self._floor = max(self._floor, self._counter(found))

    def run(self, group: SequenceGroup) -> None:
        """Count a group that was admitted."""
        if not group.computes_prefix:
            found = self._tenants[group.submit.tenant]
            found.num_groups += 1
            found.num_sequences += group.num_slots
            self.num_running += group.num_slots

    def stop_running(self, group: SequenceGroup) -> None:
        """Count a group that ended or was preempted as running no more; it does not decode now."""
        if not group.computes_prefix:
            found = self._tenants[group.submit.tenant]
            found.num_groups -= 1
            found.num_sequences -= group.num_slots
            self.num_running -= group.num_slots

    def end_sequence(self, group: SequenceGroup) -> None:
        """Count one sequence less of a running group that has several."""
        if not group.computes_prefix:
            self._tenants[group.submit.tenant].num_sequences -= 1
            self.num_running -= 1

    # ------------------------------------------------------------- service

    def charge_prompt(self, group: SequenceGroup, num_tokens: int) -> None:
        """Charge a tenant for prompt tokens that are computed for the first time."""
        self._tenants[group.submit.tenant].served += self._prompt_weight * num_tokens

    def charge_generated(self, group: SequenceGroup, num_tokens: int) -> None:
        """Charge a tenant for tokens that are generated beside those of ``decode``."""
        if not group.computes_prefix:
            self._tenants[group.submit.tenant].served += self._generated_weight * num_tokens

    def decode(self, group: SequenceGroup, num_sequences: int) -> None:
        """Let so many more (or fewer) of a group's sequences generate a token in every step."""
        if not group.computes_prefix:
            found = self._tenants[group.submit.tenant]
            self._settle(found)
            found.num_decoding += num_sequences

    def _counter(self, found: _Tenant) -> float:
        num_generated = found.num_decoding * (self.step - found.since_step)
        return found.served + self._generated_weight * num_generated

    def _settle(self, found: _Tenant) -> None:
        found.served, found.since_step = self._counter(found), self.step

    def _raise_floor(self) -> None:
        """Raise the floor to the lowest counter of the tenants with requests."""
        counters = [self._counter(found) for found in self._tenants.values() if found.num_requests]
        if counters:
            self._floor = max(self._floor, min(counters))

    def _forget(self) -> None:
        """Drop tenants without requests whose counters are not above the floor."""
        self._raise_floor()
        self._tenants = {
            name: found
            for name, found in self._tenants.items()
            if found.num_requests or self._counter(found) > self._floor
        }
        self._forget_at = max(_FORGET_AT, 2 * len(self._tenants))
