"""Progress of benchmarks that take long, beside their results on standard output."""

import sys


def show(line: str) -> None:
    """Print one line of progress."""
    print(line, file=sys.stderr, flush=True)
