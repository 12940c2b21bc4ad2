"""Requests for tests, with defaults."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shared.messages.requests import Pin, Submit
from shared.sampling import SamplingParams


def sampling(**changes: Any) -> SamplingParams:
    """Greedy sampling of 16 tokens; ``changes`` by field name."""
    return replace(SamplingParams.greedy(16), **{"ignore_eos": False, **changes})


def submit(
    request_id: str = "r0",
    prompt: Sequence[int] = (1, 2, 3),
    received_ms: int = 0,
    num_choices: int = 1,
    priority: int = 0,
    cache_salt: str = "",
    tenant: str = "",
    **changes: Any,
) -> Submit:
    """A request with this prompt; ``changes`` go to its sampling parameters."""
    return Submit(
        request_id=request_id,
        gateway="gateway",
        attachment="attachment",
        prompt=np.array(prompt, np.int32),
        sampling=sampling(**changes),
        received_ms=received_ms,
        num_choices=num_choices,
        priority=priority,
        cache_salt=cache_salt,
        tenant=tenant,
    )


def pin(prefix_id: str, tokens: Sequence[int], cache_salt: str = "") -> Pin:
    """A request to pin a prefix."""
    return Pin(prefix_id, f"name of {prefix_id}", np.array(tokens, np.int32), cache_salt)
