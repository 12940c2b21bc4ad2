"""The clients' requests: the same for the same seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_FORMATS: tuple[dict[str, Any], ...] = (
    {"guided_regex": r"([A-Z][a-z]{1,9} [0-9]{1,4}; ){2,40}"},
    {"guided_choice": ["Anne", "Mr. Knightley of Donwell Abbey", "the whale", "the white whale"]},
    {"guided_grammar": 'start: line+\nline: /[a-z]{2,12}/ ("," | ".") " "'},
    {
        "guided_json": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 1, "maximum": 120},
                "places": {"type": "array", "items": {"enum": ["sea", "garden", "village"]}},
            },
            "required": ["name", "age", "places"],
        }
    },
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "sail",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "string", "maxLength": 40},
                "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 20},
            },
            "required": ["to", "days"],
        },
    },
}
_PLAIN, _STRUCTURED, _TOOLS = range(3)
_BEAMS_EVERY = 10
_PENALTIES_EVERY = 3
_NUM_BEAMS = 3
_LONGEST_BEAM_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        key: its name in reports.
        body: of the POST, without the fields for resuming.
        path: to which it is sent.
    """

    key: str
    body: dict[str, Any]
    path: str = "/v1/completions"

    @property
    def num_choices(self) -> int:
        """Number of texts in its answer."""
        return int(self.body["n"])

    @property
    def is_search(self) -> bool:
        """Whether it is a beam search."""
        return "use_beam_search" in self.body


def make_asks(
    seed: int,
    num_clients: int,
    num_requests: int,
    tokens: tuple[int, int],
    of_applications: bool = False,
) -> Sequence[Sequence[Ask]]:
    """Requests by client.

    Args:
        num_requests: of each client.
        tokens: the shortest and the longest answer.
        of_applications: a third asks for structured output, and a third for a call of a tool.
    """

    def make(client: int, index: int) -> Ask:
        draw = random.Random(f"{seed}/{client}/{index}")
        plain = _make(draw, client, index, tokens)
        kind = (index + 2 * client) % 3 if of_applications else _PLAIN
        if kind == _PLAIN or (plain.is_search and kind == _TOOLS):
            return plain
        body = {name: value for name, value in plain.body.items() if name != "ignore_eos"}
        if kind == _STRUCTURED:
            return replace(plain, body=body | draw.choice(_FORMATS))
        message = {"role": "user", "content": body.pop("prompt")}
        body |= {"messages": [message], "n": 1, "tools": [_TOOL]}
        body["tool_choice"] = draw.choice(
            ["required", {"type": "function", "function": {"name": "sail"}}]
        )
        return Ask(plain.key, body, "/v1/chat/completions")

    return [[make(c, i) for i in range(num_requests)] for c in range(num_clients)]


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
