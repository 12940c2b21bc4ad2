"""Messages of ``{E}:prompts``, from the scheduler to its successors and to gateways.

A prompt is read by a recovery, and by a gateway that takes over a request of which it has only the
id. The other readers of ``outputs`` do without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared.codec import IntArray, Message, decode, message
from shared.errors import DecodeError
from shared.messages.checks import check_tokens
from shared.messages.outputs import RequestState


@message
@dataclass(frozen=True, slots=True, eq=False)
class Prompt(Message):
    """The prompt of a request that RequestStates in ``outputs`` refer to."""

    request_id: str
    tokens: IntArray  # [num_prompt_tokens]


def decode_prompts(messages: Iterable[bytes], vocab_size: int = 0) -> dict[str, IntArray]:
    """The prompts of an entry by request, without what cannot be read.

    Args:
        vocab_size: tokens of the model; 0: not known.
    """
    found = {}
    for data in messages:
        try:
            prompt = decode(data)
            if isinstance(prompt, Prompt):
                check_tokens(prompt.tokens, vocab_size)
                found[prompt.request_id] = prompt.tokens
        except DecodeError:
            continue  # a state that refers to it has lost its prompt
    return found


def with_prompt(state: RequestState, tokens: IntArray | None) -> RequestState | None:
    """A state with the prompt that it refers to; None if that is missing or another one."""
    submit = None if tokens is None else state.submit.with_prompt(tokens)
    return None if submit is None else replace(state, submit=submit, prompt_at="")
