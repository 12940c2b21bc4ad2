"""A prompt that fills the model's context of 8,192 tokens, and what transformers makes of it.

Transformers needs minutes for it, so its answer is kept in ``long_text.json``. To compute it again:

    python -m tests.real_model.long_text
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from deploy.settings import REPOSITORY
from tests.real_model.alone import Alone, Tokens
from tests.support.real_model import find_real_model

CONTEXT = 8_192
NUM_OUTPUT = 16
EVERY = 32  # every so many-th log-probability of the prompt is kept
_KEPT = Path(__file__).with_name("long_text.json")
_SEED = 8_192


@dataclass(frozen=True, slots=True)
class Expected:
    """Transformers' answer in float32.

    Attributes:
        mean_logprob: of all tokens of the prompt but the first.
        logprobs: of each ``EVERY``-th of these.
        output: greedy.
    """

    mean_logprob: float
    logprobs: list[float]
    output: Tokens


def long_prompt(alone: Alone) -> Tokens:
    """The licence's lines in several orders, after a word that is asked for at the end."""
    rng = random.Random(_SEED)
    lines = (REPOSITORY / "LICENSE").read_text().split("\n")
    text = "The secret word is heron.\n"
    for _ in range(5):
        text += "\n".join(rng.sample(lines, len(lines)))
    begin = alone.encode("<|im_start|>user\n")
    end = alone.encode(
        "\nWhat is the secret word that I wrote at the beginning?<|im_end|>\n"
        "<|im_start|>assistant\nThe secret word is"
    )
    body = alone.encode(text)
    room = CONTEXT - NUM_OUTPUT - len(begin) - len(end)
    assert len(body) > room
    return [*begin, *body[:room], *end]


def expected() -> Expected:
    """What is kept."""
    return Expected(**json.loads(_KEPT.read_text()))


def main() -> None:
    """Compute it and keep it."""
    alone = Alone(find_real_model())
    prompt = long_prompt(alone)
    logprobs = alone.prompt_logprobs(prompt)
    found = {
        "mean_logprob": round(float(logprobs.double().mean()), 6),
        "logprobs": [round(float(p), 5) for p in logprobs[::EVERY]],
        "output": alone.generate(prompt, NUM_OUTPUT),
    }
    _KEPT.write_text(json.dumps(found) + "\n")
    print(alone.tokenizer.decode(found["output"]))


if __name__ == "__main__":
    main()
