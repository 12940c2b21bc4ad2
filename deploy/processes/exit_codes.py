"""The meanings of exit codes of processes."""

import signal

FUTILE_EXIT_CODES = (2, 78)  # a bad setting; a model that cannot be served


def describe_exit(code: int) -> str:
    """The meaning of an exit code, or of minus the signal that ended a process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
