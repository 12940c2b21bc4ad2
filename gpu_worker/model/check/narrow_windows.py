"""Shortens sliding windows while a model is checked, so that the check stays short."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpu_worker.model.ragged_model import LayerShape, RaggedModel

_LONGEST_WINDOW = 48
_MIN_TOKENS = 40


def length_to_check(model: RaggedModel, shapes: Sequence[LayerShape], max_model_len: int) -> int:
    """Number of tokens of a check that exceeds all windows."""
    windows = [shape.params.sliding_window or 0 for shape in shapes]
    # Some models apply a window in their mask alone; the check must be long enough to find that.
    windows += [window for _, window in _windows(model)]
    longest = max((window for window in windows if window < max_model_len), default=0)
    return min(max_model_len, max(_MIN_TOKENS, longest + longest // 2 + 8))


@contextmanager
def narrow_windows(
    model: RaggedModel, max_model_len: int
) -> Iterator[tuple[LayerShape, ...] | None]:
    """Shorten long sliding windows inside the block, in masks and in attention alike.

    Windows as long as the longest sequence are left as they are, because they hide no token.

    Yields:
        The attention layers with shortened windows; None if no window was changed.
    """
    long = range(_LONGEST_WINDOW + 1, max_model_len)
    changed = [(holder, window) for holder, window in _windows(model) if window in long]
    for holder, _ in changed:
        holder.sliding_window = _LONGEST_WINDOW
    try:
        shapes = model.observe_layers() if changed else None
        if shapes is not None and any(shape.params.sliding_window in long for shape in shapes):
            _restore(changed)  # the window comes from elsewhere, so the check must be longer
            shapes = None
        yield shapes
    finally:
        _restore(changed)


def _windows(model: RaggedModel) -> list[tuple[Any, int]]:
    """The configuration and the modules with a sliding window, and its length in tokens."""
    holders = (model.config, *model.model.modules())
    found = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    return [(holder, window) for holder, window in found if isinstance(window, int)]


def _restore(changed: Sequence[tuple[Any, int]]) -> None:
    for holder, window in changed:
        holder.sliding_window = window
