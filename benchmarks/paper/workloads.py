"""The papers' requests: lengths from traces if they are available, else look-alikes.

Some workloads are in no available trace and are always made up, in the same way: rounds of
conversations, translated sentences, and the long conversations of the vAttention paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.lengths import DATASETS, Mixture, Part, read_lengths
from benchmarks.simulator.system import SimRequest

_MODEL_LEN = 2_048
_POOL = 20_000  # look-alikes to draw from
_START_TOKEN = 1  # OPT's tokenizer adds one to each prompt; Alpaca's trace is without
_NEW_CONVERSATION = 0.1  # share of requests; the others continue a conversation
_CHAT_CUT = 1_024  # tokens of prompt and of output, section 6.5
# A sentence and its translation. The mean follows from section 6.4: four more examples make the
# prefix 261 tokens longer, so one has 65 tokens, of which the German side is the longer one.
_SOURCE = Mixture(27.0, (Part(1.0, 25, 0.6),))
_TARGET = Mixture(38.0, (Part(1.0, 36, 0.6),))
# OpenChat conversations by Sarathi-Serve's Table 2: median and 90th percentile of prompts are 1,730
# and 5,696 tokens, of outputs 415 and 834; at most 8,192 together.
_OPENCHAT = ((1_730, 0.930), (415, 0.545))
_OPENCHAT_LIMIT = 8_192

Pairs = NDArray[np.int64]  # [num_requests, 2], prompt and output tokens


class Kind(StrEnum):
    """Kinds of requests."""

    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    CHAT = "chat"  # the last 1,024 tokens of a ShareGPT-like conversation
    TRANSLATION = "translation"
    OPENCHAT = "openchat"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind.

    Attributes:
        kind: of their lengths.
        trace_dir: folder with the traces; None for look-alikes.
        num_samples: of each request.
        beam_width: of each request; 0: no beam search.
        shared_prefix: tokens that all prompts begin with, in addition to their own.
    """

    kind: Kind
    trace_dir: Path | None = None
    num_samples: int = 1
    beam_width: int = 0
    shared_prefix: int = 0

    def requests(self, rate: float, duration_s: float, seed: int) -> Iterator[SimRequest]:
        """Poisson arrivals for a duration; lengths are drawn with replacement."""
        random = np.random.default_rng([seed, len(self.kind)])
        pairs = lengths(self.kind, self.trace_dir)
        prefix = (0,) if self.shared_prefix else ()
        now_s, number = random.exponential(1 / rate), 0
        while now_s < duration_s:
            prompt, output = pairs[random.integers(len(pairs))].tolist()
            yield SimRequest(
                id=number,
                arrival_s=now_s,
                prompt_tokens=prompt + self.shared_prefix,
                output_tokens=output,
                num_samples=self.num_samples,
                beam_width=self.beam_width,
                prefix=prefix,
                prefix_block_tokens=self.shared_prefix,
            )
            now_s += random.exponential(1 / rate)
            number += 1

    def wide(self, num_samples: int = 1, beam_width: int = 0) -> "Workload":
        """The same requests, each with several sequences."""
        return replace(self, num_samples=num_samples, beam_width=beam_width)


@lru_cache(maxsize=8)
def lengths(kind: Kind, trace_dir: Path | None) -> Pairs:
    """Prompt and output tokens to draw from, [num_requests, 2]."""
    random = np.random.default_rng(len(kind))
    if kind is Kind.TRANSLATION:
        return _stacked(_SOURCE.draw(_POOL, 256, random), _TARGET.draw(_POOL, 256, random))
    if kind is Kind.OPENCHAT:
        return _openchat(random)
    if kind is Kind.CHAT:
        return _conversations(lengths(Kind.SHAREGPT, trace_dir), random)
    dataset = next(each for each in DATASETS if each.name == kind.value)
    if trace_dir is None:
        found = dataset.draw(_POOL, _MODEL_LEN, random)
    else:
        found = read_lengths(trace_dir / dataset.trace)
    pairs = np.array([(each.prompt, each.output) for each in found], np.int64)
    if kind is Kind.ALPACA and trace_dir is not None:
        pairs[:, 0] += _START_TOKEN
    return _at_most(pairs, _MODEL_LEN)


def _conversations(rounds: Pairs, random: np.random.Generator) -> Pairs:
    """Lengths of chats: a prompt is all earlier rounds and a question, cut at its beginning."""
    num_earlier = random.geometric(_NEW_CONVERSATION, _POOL) - 1
    last = rounds[random.integers(len(rounds), size=_POOL)]
    earlier = [
        rounds[random.integers(len(rounds), size=number)].sum() for number in num_earlier.tolist()
    ]
    prompts = np.minimum(last[:, 0] + np.array(earlier, np.int64), _CHAT_CUT)
    return _stacked(prompts, np.minimum(last[:, 1], _CHAT_CUT))


def _openchat(random: np.random.Generator) -> Pairs:
    columns = [
        np.maximum(np.rint(median * np.exp(sigma * random.standard_normal(_POOL))), 1)
        for median, sigma in _OPENCHAT
    ]
    return _at_most(_stacked(*columns), _OPENCHAT_LIMIT)


def _at_most(pairs: Pairs, limit: int) -> Pairs:
    """The requests whose prompt and output together have at most so many tokens."""
    found: Pairs = pairs[pairs.sum(axis=1) <= limit]
    return found


def _stacked(*columns: NDArray[np.generic]) -> Pairs:
    return np.stack(columns, axis=1).astype(np.int64)
