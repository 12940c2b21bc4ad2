"""Requests for tests, with sane defaults."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.messages import Pin, Submit
from shared.sampling import SamplingParams


def sampling(**changes: Any) -> SamplingParams:
    """Greedy, 16 tokens, nothing special; ``changes`` by field name."""
    values: dict[str, Any] = {
        "max_tokens": 16,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 0,
        "stop_token_ids": (),
        "ignore_eos": False,
        "min_tokens": 0,
        "num_logprobs": None,
        "num_prompt_logprobs": None,
    }
    return SamplingParams(**{**values, **changes})


def submit(
    request_id: str = "r0",
    prompt: Sequence[int] = (1, 2, 3),
    received_ms: int = 0,
    num_choices: int = 1,
    priority: int = 0,
    cache_salt: str = "",
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
    )


def pin(prefix_id: str, tokens: Sequence[int], cache_salt: str = "") -> Pin:
    """A prefix that is to stay."""
    return Pin(prefix_id, f"name of {prefix_id}", np.array(tokens, np.int32), cache_salt)
