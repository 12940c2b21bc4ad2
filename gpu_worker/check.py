"""The check at load that decides whether a model is served: ours against its own attention."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.allocation import Allocator
from gpu_worker.attention import PagedStep
from gpu_worker.deviation import CheckResult, judge, row_errors
from gpu_worker.model import LayerShape, RaggedModel
from gpu_worker.placement import Placement
from kernels.interface import AttentionBackend
from shared.errors import ModelUnsupported

# Longer windows are narrowed for the check: its cost must not grow with them.
_LONGEST_WINDOW = 48
_MIN_TOKENS = 40
_LAYER_TOKENS = 24


def check_model(
    model: RaggedModel,
    shapes: Sequence[LayerShape],
    backend: AttentionBackend,
    allocator: Allocator,
    max_model_len: int,
) -> CheckResult:
    """Compare a ragged batch of two sequences, in chunks over scattered blocks, with eager.

    Raises:
        ModelUnsupported: they deviate by more than rounding explains, or the pass fails.
    """
    with _narrow_windows(model, max_model_len) as shapes_now:
        length = _length(model, shapes_now or shapes, max_model_len)
        sequences = _sequences(model, length)
        expected = [model.eager_logits(tokens) for tokens in sequences]
        found = _paged_logits(model, shapes_now or shapes, backend, allocator, sequences)
        errors = [row_errors(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
        result = judge(model, sequences, expected, errors, _groups(errors))
    if not result.passed:
        raise ModelUnsupported(
            f"with paged attention the logits deviate by {result.deviation:.2g} of their spread "
            f"from those with the model's own attention; {result.tolerance:.2g} is tolerated"
        )
    return result


class LayerCheck:
    """Compares a model before and after its layers were replaced.

    Args:
        model: as it was loaded.
        instead: what to do where it is not the same, for errors.
    """

    def __init__(self, model: RaggedModel, instead: str) -> None:
        self._instead = instead
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(model.vocab_size, (_LAYER_TOKENS,), generator=generator)
        self._model = model
        self._tokens = tokens.to(model.device)
        self._expected = model.eager_logits(self._tokens)

    def result(self) -> CheckResult:
        """How far the logits are from what they were.

        Raises:
            ModelUnsupported: farther than rounding explains, or the pass fails.
        """
        try:
            found = self._model.eager_logits(self._tokens)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            raise ModelUnsupported(f"with compiled layers: {why}; {self._instead}") from error
        errors = row_errors(found, self._expected)
        result = judge(self._model, [self._tokens], [found], [errors], [errors])
        if not result.passed:
            raise ModelUnsupported(
                f"with compiled layers the logits deviate by {result.deviation:.2g} of their "
                f"spread; {result.tolerance:.2g} is tolerated; {self._instead}"
            )
        return result


def _length(model: RaggedModel, shapes: Sequence[LayerShape], max_model_len: int) -> int:
    windows = [shape.params.sliding_window or 0 for shape in shapes]
    # Some models put a window into their mask and do not tell their attention: that must show.
    windows += [window for _, window in _windows(model)]
    longest = max((window for window in windows if window < max_model_len), default=0)
    return min(max_model_len, max(_MIN_TOKENS, longest + longest // 2 + 8))


def _sequences(model: RaggedModel, length: int) -> list[torch.Tensor]:
    """Two random sequences [length], [length - 5]; int64."""
    generator = torch.Generator().manual_seed(0)
    lengths = (length, max(1, length - 5))
    return [
        torch.randint(model.vocab_size, (n,), generator=generator).to(model.device) for n in lengths
    ]


def _paged_logits(
    model: RaggedModel,
    shapes: Sequence[LayerShape],
    backend: AttentionBackend,
    allocator: Allocator,
    sequences: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Logits [n, vocabulary] of each sequence, computed together in chunks."""
    block_size = allocator.block_size
    blocks_each = -(-max(map(len, sequences)) // block_size)
    num_blocks = blocks_each * len(sequences)
    # Neighbours in a sequence must not be neighbours in the pool.
    tables = np.arange(num_blocks, dtype=np.int32)[::-1].reshape(blocks_each, -1).T
    memory = allocator.allocate(shapes, num_blocks)
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for chunks in _chunks([len(tokens) for tokens in sequences]):
        spans = [(at, at + size) for at, size in zip(done, chunks, strict=True)]
        batch = memory.translate(_placement(spans, tables, block_size)).ragged(model.device)
        tokens = torch.cat([all_[a:b] for all_, (a, b) in zip(sequences, spans, strict=True)])
        positions = torch.cat([torch.arange(a, b) for a, b in spans]).to(model.device)
        step = PagedStep(backend, memory.caches, batch)
        rows = torch.split(model.forward(tokens, positions, step, rows=None), chunks)
        memory.attended()
        for parts, part in zip(logits, rows, strict=True):
            parts.append(part)
        done = [b for _, b in spans]
    memory.close()
    return [torch.cat(parts) for parts in logits]


def _chunks(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Chunk sizes per step: uneven prompts, decodes beside chunks and alone, then the rest."""
    left = list(lengths)
    first = [min(n, 13 + 6 * index) for index, n in enumerate(left)]
    for sizes in (first, [1, 5], [1, 1], [5, 1], [1, 4], [1, 1]):
        sizes = [min(n, size) for n, size in zip(left, sizes, strict=True)]
        left = [n - size for n, size in zip(left, sizes, strict=True)]
        if any(sizes):
            yield sizes
    if any(left):
        yield left


def _placement(
    spans: Sequence[tuple[int, int]], tables: npt.NDArray[np.int32], block_size: int
) -> Placement:
    """Rows [a, b) of each sequence; ``tables`` is [S, max_blocks]."""
    positions = np.concatenate([np.arange(a, b) for a, b in spans])
    sizes = np.array([b - a for a, b in spans])
    sequences = np.repeat(np.arange(len(spans)), sizes)
    blocks = tables[sequences, positions // block_size].astype(np.int64)
    return Placement(
        slots=np.arange(len(spans)),
        sizes=sizes,
        positions=positions,
        context_lens=np.array([b for _, b in spans]),
        num_blocks=np.full(len(spans), tables.shape[1]),
        block_tables=np.ascontiguousarray(tables),
        slot_mapping=blocks * block_size + positions % block_size,
    )


def _groups(errors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Errors of rows that one mistake would make wrong together, given those of each sequence.

    Quarters of each sequence, and of both the rows that are computed alone, and the first and the
    last ones of longer chunks.
    """
    alone, first, last = [], [], []
    left = list(errors)
    for sizes in _chunks([len(each) for each in errors]):
        chunks = [each[:size] for each, size in zip(left, sizes, strict=True)]
        left = [each[size:] for each, size in zip(left, sizes, strict=True)]
        alone += [chunk for chunk in chunks if len(chunk) == 1]
        first += [chunk[:1] for chunk in chunks if len(chunk) > 1]
        last += [chunk[-1:] for chunk in chunks if len(chunk) > 1]
    quarters = [quarter for each in errors for quarter in each.chunk(4)]
    return quarters + [torch.cat(rows) for rows in (alone, first, last) if rows]


def _windows(model: RaggedModel) -> list[tuple[Any, int]]:
    """The configuration and modules that have a sliding window, and its tokens."""
    holders = (model.config, *model.model.modules())
    found = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    return [(holder, window) for holder, window in found if isinstance(window, int)]


@contextmanager
def _narrow_windows(
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


def _restore(changed: Sequence[tuple[Any, int]]) -> None:
    for holder, window in changed:
        holder.sliding_window = window
