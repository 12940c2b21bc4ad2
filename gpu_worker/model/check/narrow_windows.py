"""Sliding windows that are short while a model is checked: the cost must not grow with them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpu_worker.model.ragged_model import LayerShape, RaggedModel

_LONGEST_WINDOW = 48
_MIN_TOKENS = 40


def length_to_check(model: RaggedModel, shapes: Sequence[LayerShape], max_model_len: int) -> int:
    """Tokens that are more than all windows hold."""
    windows = [shape.params.sliding_window or 0 for shape in shapes]
    # Some models put a window into their mask and do not tell their attention: that must show.
    windows += [window for _, window in _windows(model)]
    longest = max((window for window in windows if window < max_model_len), default=0)
    return min(max_model_len, max(_MIN_TOKENS, longest + longest // 2 + 8))


@contextmanager
def narrow_windows(
    model: RaggedModel, max_model_len: int
) -> Iterator[tuple[LayerShape, ...] | None]:
    """Meanwhile long sliding windows are short, in masks and in attention alike.

    Those that no sequence is longer than are left as they are: they hide nothing.

    Yields the layers as they are meanwhile, None if nothing was changed.
    """
    long = range(_LONGEST_WINDOW + 1, max_model_len)
    changed = [(holder, window) for holder, window in _windows(model) if window in long]
    for holder, _ in changed:
        holder.sliding_window = _LONGEST_WINDOW
    try:
        shapes = model.observe_layers() if changed else None
        if shapes is not None and any(shape.params.sliding_window in long for shape in shapes):
            _restore(changed)  # the window has another source: the check must be long instead
            shapes = None
        yield shapes
    finally:
        _restore(changed)


def _windows(model: RaggedModel) -> list[tuple[Any, int]]:
    """The configuration and modules that have a sliding window, and its tokens."""
    holders = (model.config, *model.model.modules())
    found = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    return [(holder, window) for holder, window in found if isinstance(window, int)]


def _restore(changed: Sequence[tuple[Any, int]]) -> None:
    for holder, window in changed:
        holder.sliding_window = window
