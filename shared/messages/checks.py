"""Checks values of messages beyond their types, before a message takes effect.

Every start reads the log again, so an entry that makes a reader fail would make every later start
fail. ``check`` refuses such an entry as if it could not be decoded.
"""

import math
from collections.abc import Iterable, Sized

from shared.bus.api import EntryId
from shared.codec import IntArray, Message
from shared.errors import DecodeError
from shared.messages.endings import EndFlag, FinishReason
from shared.messages.outputs import (
    BeamCandidates,
    BeamsEnded,
    ChoiceEnded,
    ChoiceState,
    RequestEnded,
    RequestState,
    StepResult,
)
from shared.messages.requests import Attach, Pin, Stop, Submit
from shared.sampling import BeamParams

_END_FLAGS = frozenset(int(flag) for flag in EndFlag)
_MOST_TOKENS = 2**31  # without a vocabulary, only negative ids are wrong


def check(message: Message, vocab_size: int = 0) -> None:
    """Check a message of ``requests`` or ``outputs``.

    Args:
        vocab_size: tokens of the model; 0: not known.

    Raises:
        DecodeError: a value is impossible; with the reason, and the request's id if there is one.
    """
    most_tokens = vocab_size or _MOST_TOKENS
    try:
        match message:
            case StepResult():
                _check_result(message, most_tokens)
            case RequestState():
                _check_state(message, most_tokens)
            case RequestEnded() | ChoiceEnded():
                FinishReason(message.reason)
                EntryId.parse(message.requests_cursor)
            case BeamsEnded():
                EntryId.parse(message.requests_cursor)
            case Submit():
                _check_submit(message, most_tokens)
            case Attach():
                _check_attach(message, most_tokens)
            case Stop() if message.num_tokens < 0:
                raise ValueError(f"num_tokens={message.num_tokens}: expected 0 or more")
            case Pin():
                _check_tokens("tokens", message.tokens, most_tokens)
    except ValueError as error:
        request_id = message.request_id if isinstance(message, Submit | Attach | Stop) else None
        raise DecodeError(f"{type(message).__name__}: {error}", request_id) from None


def check_tokens(tokens: IntArray, vocab_size: int = 0) -> None:
    """Check the tokens of a prompt.

    Raises:
        DecodeError: one is not of the vocabulary.
    """
    try:
        _check_tokens("tokens", tokens, vocab_size or _MOST_TOKENS)
    except ValueError as error:
        raise DecodeError(str(error)) from None


def _check_tokens(name: str, tokens: IntArray, most_tokens: int) -> None:
    if len(tokens) == 0:
        return
    # For the few tokens of a step, argmin and argmax take half the time of min and max.
    least, most = tokens.item(tokens.argmin()), tokens.item(tokens.argmax())
    if least < 0 or most >= most_tokens:
        wrong = next(found for found in tokens.tolist() if not 0 <= found < most_tokens)
        raise ValueError(f"{name}: token {wrong}, the vocabulary has 0 to {most_tokens - 1}")


def _check_result(result: StepResult, most_tokens: int) -> None:
    # Every step has a result, so this is written for speed.
    num_rows = len(result.handles)
    if len(result.tokens) != num_rows:
        _check_same_length("tokens", result.tokens, num_rows)
    _check_tokens("tokens", result.tokens, most_tokens)
    if len(result.ended_rows) or len(result.ended_flags):
        rows, flags = result.ended_rows.tolist(), result.ended_flags.tolist()
        _check_same_length("ended_flags", flags, len(rows))
        if not (min(rows) >= 0 and max(rows) < num_rows and len(set(rows)) == len(rows)):
            raise ValueError(f"ended_rows={rows!r:.80}: expected different ones of {num_rows}")
        if not _END_FLAGS.issuperset(flags):
            raise ValueError(f"ended_flags={flags!r:.80}")
    num_admitted = len(result.admitted_handles)
    if len(result.admitted_computed) != num_admitted:
        _check_same_length("admitted_computed", result.admitted_computed, num_admitted)
    for candidates in result.beams:
        _check_candidates(candidates, most_tokens)


def _check_candidates(candidates: BeamCandidates, most_tokens: int) -> None:
    num_rows = len(candidates.parents)
    _check_same_length("beams.tokens", candidates.tokens, num_rows)
    _check_same_length("beams.scores", candidates.scores, num_rows)
    _check_same_length("beams.flags", candidates.flags, num_rows)
    _check_tokens("beams.tokens", candidates.tokens, most_tokens)
    if not (_END_FLAGS | {0}).issuperset(candidates.flags.tolist()):
        raise ValueError(f"beams.flags={candidates.flags.tolist()!r:.80}")


def _check_same_length(name: str, found: Sized, expected: int) -> None:
    if len(found) != expected:
        raise ValueError(f"{name}: {len(found)} of them, expected {expected}")


def _check_state(state: RequestState, most_tokens: int) -> None:
    EntryId.parse(state.requests_cursor)
    if state.prompt_at:
        EntryId.parse(state.prompt_at)
    _check_submit(state.submit, most_tokens)
    for choice in state.choices:
        _check_choice(choice, most_tokens)
    beams = state.submit.sampling.beams
    if beams is not None:
        _check_beams(state.choices, beams)
        return
    numbers = [choice.choice for choice in state.choices]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"choices {numbers!r:.80}: expected different ones")
    if numbers and not (min(numbers) >= 0 and max(numbers) < state.submit.num_choices):
        raise ValueError(f"choices {numbers!r:.80}: there are {state.submit.num_choices}")


def _check_choice(choice: ChoiceState, most_tokens: int) -> None:
    _check_tokens("choices.output", choice.output, most_tokens)
    if choice.finish_reason:
        FinishReason(choice.finish_reason)


def _check_beams(choices: Iterable[ChoiceState], params: BeamParams) -> None:
    lengths = [len(beam.output) for beam in choices if not beam.finish_reason]
    if len(lengths) > params.width or len(set(lengths)) > 1:
        raise ValueError(f"beams of {lengths!r:.80} tokens: expected {params.width} of one length")
    for beam in choices:
        if len(beam.output) != len(beam.scores):
            raise ValueError(f"a beam of {len(beam.output)} tokens with {len(beam.scores)} scores")
        if beam.finish_reason and not len(beam.output):
            raise ValueError("a finished beam without a token")


def _check_submit(submit: Submit, most_tokens: int) -> None:
    _check_tokens("prompt", submit.prompt, most_tokens)
    sampling = submit.sampling
    if submit.num_choices < 1:
        raise ValueError(f"num_choices={submit.num_choices}: expected 1 or more")
    if sampling.max_tokens < 1:
        raise ValueError(f"sampling.max_tokens={sampling.max_tokens}: expected 1 or more")
    if (beams := sampling.beams) is not None:
        if beams.width != submit.num_choices:
            raise ValueError(f"sampling.beams.width={beams.width}: {submit.num_choices} choices")
        if not math.isfinite(beams.length_penalty):
            raise ValueError(f"sampling.beams.length_penalty={beams.length_penalty}")


def _check_attach(attach: Attach, most_tokens: int) -> None:
    for view in attach.views:
        _check_tokens("views.tokens", view.tokens, most_tokens)
        if view.finish_reason:
            FinishReason(view.finish_reason)
    if (submit := attach.submit) is not None:
        _check_submit(submit, most_tokens)
        if submit.request_id != attach.request_id:
            raise ValueError(f"submit.request_id={submit.request_id!r:.80}: another request's")
