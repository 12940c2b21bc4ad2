"""The clients' requests: the same for the same seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_OPENINGS = (
    "Once upon a time there was",
    "It was a dark night and the captain",
    "My dear Emma, I have",
    "The captain looked at the sea and said that",
    "There was a garden behind the house, and in it",
    "Nobody in the village knew why",
    "The letter began with these words:",
)
_NAMES = ("Anne", "Harriet", "Mr. Knightley", "Father Brown", "Queequeg", "the whale", "the Duke")
_BEAMS_EVERY = 10
_PENALTIES_EVERY = 3
_NUM_BEAMS = 3
_LONGEST_BEAM_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        key: its name in reports.
        body: of the POST to /v1/completions, without the fields for resuming.
    """

    key: str
    body: dict[str, Any]

    @property
    def num_choices(self) -> int:
        """Number of texts in its answer."""
        return int(self.body["n"])

    @property
    def is_search(self) -> bool:
        """Whether it is a beam search."""
        return "use_beam_search" in self.body


def make_asks(
    seed: int, num_clients: int, num_requests: int, tokens: tuple[int, int]
) -> Sequence[Sequence[Ask]]:
    """Requests by client.

    Args:
        num_requests: of each client.
        tokens: the shortest and the longest answer.
    """
    return [
        [_make(random.Random(f"{seed}/{c}/{i}"), c, i, tokens) for i in range(num_requests)]
        for c in range(num_clients)
    ]


def _make(draw: random.Random, client: int, index: int, tokens: tuple[int, int]) -> Ask:
    names = ", ".join(draw.choice(_NAMES) for _ in range(draw.randint(1, 12)))
    body: dict[str, Any] = {
        "model": "chaos",
        "prompt": f"{draw.choice(_OPENINGS)} {names} and",
        "max_tokens": draw.randint(*tokens),
        "n": draw.choice((1, 1, 2)),
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    if (index + client) % _BEAMS_EVERY == _BEAMS_EVERY - 1:
        longest = min(body["max_tokens"], _LONGEST_BEAM_TOKENS)
        body |= {"use_beam_search": True, "n": _NUM_BEAMS, "max_tokens": longest}
    elif draw.random() < 0.5:
        body |= {"temperature": 0.8, "seed": draw.randrange(2**32)}
    if (index + client) % _PENALTIES_EVERY == 0 and "use_beam_search" not in body:
        body |= {"repetition_penalty": 1.05, "frequency_penalty": 0.4, "presence_penalty": -0.2}
        body["logit_bias"] = {str(token): 0.5 for token in range(100, 200)}
    if draw.random() < 0.75 or "use_beam_search" in body:
        body["ignore_eos"] = True  # most are as long as intended
    return Ask(f"c{client}r{index}", body)
