"""Results of steps as the core takes them: checked, with the sequences that have ended."""

from scheduler_svc.core.config import ProtocolError
from shared.errors import DecodeError
from shared.messages.checks import check
from shared.messages.endings import EndFlag
from shared.messages.outputs import StepResult


def ended_in(result: StepResult) -> list[tuple[int, EndFlag]]:
    """Handles of sequences that have ended, and why."""
    handles = result.handles[result.ended_rows].tolist()
    return list(zip(handles, map(EndFlag, result.ended_flags.tolist()), strict=True))


def check_result(result: StepResult, vocab_size: int) -> None:
    """Check a result that was read.

    Raises:
        ProtocolError: it is inconsistent.
    """
    try:
        check(result, vocab_size)
    except DecodeError as error:
        raise ProtocolError(f"result of step {result.step}: {error}") from None
