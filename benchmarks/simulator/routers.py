"""Choose the engine of a request."""

from collections.abc import Callable, Sequence
from itertools import cycle

Router = Callable[[Sequence[int]], int]
"""Maps the number of requests of each engine to the index of one."""


def round_robin(num_engines: int) -> Router:
    """One engine after the other."""
    turns = cycle(range(num_engines))
    return lambda _: next(turns)


def least_loaded(num_engines: int) -> Router:
    """The first of the engines with the fewest requests."""
    engines = range(num_engines)
    return lambda num_open: min(engines, key=num_open.__getitem__)
