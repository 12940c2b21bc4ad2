"""The parameters of a random walk: geometry, limits, mixture of events, and its requests."""

import random
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from scheduler_svc.core.config import Preemption, SchedulerConfig
from shared.messages.requests import Pin, Submit
from shared.sampling import BeamParams, EarlyStopping
from tests.support.requests import sampling
from tests.support.walks.clients import VOCABULARY, Choice, Client

_MAX_MODEL_LEN = 96  # tokens
_MAX_WIDTH = 4  # beams
_NUM_FAMILIES = 3
_SALTS = ["", "salt"]
_TENANTS = ["alice", "bob", "carol"]


class Event(Enum):
    """The events of a walk."""

    SUBMIT = auto()
    ABORT = auto()  # valid, or with a stale attachment
    STOP = auto()  # a gateway has found a stop string
    TURN = auto()  # the scheduler reads, plans and appends
    EXECUTE = auto()  # the worker executes plans and appends results
    CHECKPOINT = auto()  # old requests are stated again, so that the log can be trimmed
    PIN = auto()  # a gateway pins a prefix, perhaps not for the first time
    FAIL = auto()  # a new epoch, with a new scheduler and a new worker


@dataclass(frozen=True)
class Profile:
    """The parameters of a walk."""

    config: SchedulerConfig
    weights: dict[Event, float]
    flavours: bool  # clients sample the same tokens as others, so that generated blocks are shared
    max_choices: int
    beam_share: float  # share of beam searches among the requests
    num_salts: int
    num_tenants: int
    longest_prompt: int  # tokens
    longest_output: int
    num_priorities: int
    pool_may_change: bool  # from epoch to epoch

    def client(self, number: int, rng: random.Random, most_choices: int) -> Client:
        """A random request of this walk.

        Args:
            number: order of arrival, from 1.
            most_choices: most that can run.
        """
        family = rng.randrange(_NUM_FAMILIES)
        num_prompt = rng.randint(1, self.longest_prompt) if rng.random() < 0.99 else 0
        num_own = rng.choice([0, rng.randint(0, num_prompt)])
        prompt = _family(family, num_prompt - num_own)
        prompt += [rng.randrange(VOCABULARY) for _ in range(num_own)]
        max_tokens = rng.randint(1, self.longest_output)
        has_beams = rng.random() < self.beam_share
        num_choices = rng.randint(1, _MAX_WIDTH if has_beams else self.max_choices)
        if rng.random() < 0.95:
            num_choices = min(num_choices, most_choices)
        beams = None
        if has_beams:
            penalty, early = rng.choice([-1.0, 0.0, 1.0, 2.0]), rng.choice(list(EarlyStopping))
            beams = BeamParams(num_choices, penalty, early)
        submit = Submit(
            request_id=f"r{number}",
            gateway="gateway",
            attachment=f"attachment-{number}",
            prompt=np.array(prompt, np.int32),
            sampling=sampling(
                max_tokens=max_tokens,
                seed=number,
                num_prompt_logprobs=0 if rng.random() < 0.03 else None,
                beams=beams,
            ),
            received_ms=number // 2,
            num_choices=num_choices,
            priority=rng.randrange(self.num_priorities),
            cache_salt=rng.choice(_SALTS[: self.num_salts]),
            tenant=rng.choice(_TENANTS[: self.num_tenants]),
        )
        return Client(
            number,
            submit,
            flavour=rng.randrange(2) if self.flavours else None,
            stop_period=rng.choice([2, 5, 101] if has_beams else [11, 101, 10_007]),
            max_output=min(max_tokens, self.config.max_model_len - num_prompt),
            choices=[Choice() for _ in range(num_choices)],
        )

    def prefix(self, bits: int) -> tuple[Pin, Client]:
        """A prefix to pin, and the client that computes it if no request does.

        Requests of a prefix's family begin with it, if they have the family's salt.
        """
        family = bits % _NUM_FAMILIES
        num_tokens = 1 + bits // _NUM_FAMILIES % self.longest_prompt
        tokens = np.array(_family(family, num_tokens), np.int32)
        prefix_id = f"prefix-{family}-{num_tokens}"
        salt = _SALTS[family % self.num_salts]
        block_size = self.config.block_size
        full = tokens[: num_tokens // block_size * block_size]
        submit = Submit(prefix_id, "", "", full, sampling(max_tokens=1), 0, 1, 0, salt)
        computing = Client(0, submit, None, 10_007, max_output=1, choices=[Choice()])
        return Pin(prefix_id, f"name of {prefix_id}", tokens, salt), computing


def _family(family: int, num_tokens: int) -> list[int]:
    """The common beginning of the prompts of a family."""
    return [family * 100 + index for index in range(num_tokens)]


def random_profile(rng: random.Random) -> Profile:
    """Small pools, tight budgets, any mixture of events."""
    config = _random_config(rng)
    return Profile(
        config=config,
        weights={
            Event.SUBMIT: rng.choice([0.2, 0.5, 1]),
            Event.ABORT: rng.choice([0, 0.05, 0.2]),
            Event.STOP: rng.choice([0, 0.05, 0.3]),
            Event.TURN: rng.choice([2, 5]),
            Event.EXECUTE: rng.choice([2, 5]),
            Event.CHECKPOINT: rng.choice([0, 0.3]),
            Event.PIN: rng.choice([0.1, 0.3] if config.max_pinned_blocks else [0, 0, 0, 0.05]),
            Event.FAIL: rng.choice([0, 0, 0.03, 0.1]),
        },
        flavours=rng.random() < 0.4,
        max_choices=rng.choice([1, 1, 2, 4]),
        beam_share=rng.choice([0, 0, 0.2, 0.6]),
        num_salts=rng.choice([1, 1, 2]),
        num_tenants=rng.choice([1, 2, 3]),
        longest_prompt=rng.choice([5, 20, 40]),
        longest_output=rng.choice([8, 25, 50]),
        num_priorities=rng.choice([1, 1, 3]),
        pool_may_change=rng.random() < 0.3,
    )


def _random_config(rng: random.Random) -> SchedulerConfig:
    block_size = 2 ** rng.randint(0, 5)
    num_blocks = max(2, rng.randint(20, 120) // block_size)
    max_num_sequences = rng.randint(1, 8)
    is_fair = rng.random() < 0.5
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=_MAX_MODEL_LEN,
        max_num_sequences=max_num_sequences,
        max_num_batched_tokens=max_num_sequences + rng.choice([0, 1, 3, 16, 64]),
        max_plans_in_flight=rng.randint(1, 4),
        num_watermark_blocks=rng.choice([0, num_blocks // 10, num_blocks // 4]),
        outputs_retention=rng.choice([2, 10, 100]),
        prefix_caching=rng.random() < 0.7,
        num_host_blocks=rng.choice([0, num_blocks // 2, 2 * num_blocks]),
        preemption=rng.choice(list(Preemption)),
        recompute_us_per_token=1.0,
        swap_us_per_block=rng.choice([0.1, 1.0, 4.0]),
        max_pinned_blocks=rng.choice([0, 0, num_blocks // 4, num_blocks // 2]),
        max_prompt_tokens=rng.choice([0, 0, 1, 5]),
        max_passing_steps=rng.choice([0, 3, 30]),
        tenants_share_prefixes=rng.random() < 0.5,
        fair_queueing=is_fair,
        max_tenant_sequences=rng.choice([0, 0, 1, 3]) if is_fair else 0,
        max_tenant_slowdown=rng.choice([0, 1, 1.5]) if is_fair else 0,
        step_overhead_tokens=rng.choice([0.5, 3.0]),
        enough_prompt_tokens=rng.choice([0, 0, 1, 4]),
    )
