"""Exit codes of processes: what they mean, in words."""

import signal

FUTILE_EXIT_CODES = (2, 78)  # a bad setting; a model that cannot be served


def describe_exit(code: int) -> str:
    """An exit code, or minus the signal that ended a process, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
