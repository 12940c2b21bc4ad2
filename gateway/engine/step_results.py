"""The parts of a step's result, read as a whole: what contradicts itself raises ValueError."""

from shared.messages.endings import EndFlag
from shared.messages.outputs import StepResult


def sampled_rows(result: StepResult) -> list[tuple[int, int, EndFlag | None]]:
    """Handle, token and end of every row.

    Raises:
        ValueError: the result cannot be.
    """
    handles, tokens = result.handles.tolist(), result.tokens.tolist()
    if min(tokens, default=0) < 0:
        raise ValueError(f"token {min(tokens)}")
    flags = [EndFlag(flag) for flag in result.ended_flags.tolist()]
    ended = dict(zip(result.ended_rows.tolist(), flags, strict=True))
    return [
        (handle, token, ended.get(row))
        for row, (handle, token) in enumerate(zip(handles, tokens, strict=True))
    ]


def admissions(result: StepResult) -> list[tuple[int, int]]:
    """Handle of every admitted sequence, and how many of its tokens needed no computing."""
    handles, computed = result.admitted_handles.tolist(), result.admitted_computed.tolist()
    return list(zip(handles, computed, strict=True))
