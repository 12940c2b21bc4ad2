"""Log-probabilities of many positions, encoded as columns.

A prompt of thousands of tokens has as many positions. One map per position would be several times
as large, and every reader of the log would build an object for each position, needed or not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, overload

import numpy as np
import numpy.typing as npt

from shared.codec import FloatArray, IntArray
from shared.errors import DecodeError


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    row: int  # index into StepResult.handles, or the position in the prompt
    logprob: float  # of the token at this position; float32 on the wire
    top_ids: IntArray  # [k] descending
    top_logprobs: FloatArray  # [k]


class LogprobColumns(Sequence[TokenLogprobs]):
    """Decoded positions; the object of a position is made when it is accessed.

    Args:
        rows: [n]
        logprobs: [n]
        counts: [n] number of top tokens at each position
        top_ids: [sum of counts]
        top_logprobs: [sum of counts]
    """

    __slots__ = ("_ends", "_logprobs", "_rows", "_top_ids", "_top_logprobs")

    def __init__(
        self,
        rows: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        counts: npt.NDArray[np.int32],
        top_ids: npt.NDArray[np.int32],
        top_logprobs: npt.NDArray[np.float32],
    ) -> None:
        self._rows, self._logprobs = rows, logprobs
        self._ends = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self._top_ids, self._top_logprobs = top_ids, top_logprobs

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        top = slice(self._ends[index], self._ends[index + 1])
        return TokenLogprobs(
            int(self._rows[index]),
            float(self._logprobs[index]),
            self._top_ids[top],
            self._top_logprobs[top],
        )

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(self.__getitem__, range(len(self)))


class _Wire:
    """Wire format: a map of packed columns, or an empty list if there are no positions."""

    def encode(self, items: Sequence[TokenLogprobs]) -> Any:
        if not items:
            return []
        return {
            "rows": _packed([item.row for item in items], "<i4"),
            "logprobs": _packed([item.logprob for item in items], "<f4"),
            "counts": _packed([len(item.top_ids) for item in items], "<i4"),
            "top_ids": _packed(np.concatenate([item.top_ids for item in items]), "<i4"),
            "top_logprobs": _packed(np.concatenate([item.top_logprobs for item in items]), "<f4"),
        }

    def decode(self, data: Any) -> Sequence[TokenLogprobs]:
        if data == []:
            return ()
        if not isinstance(data, dict):
            raise DecodeError(f"expected columns, got {data!r:.80}")
        rows, counts = _column(data, "rows", "<i4"), _column(data, "counts", "<i4")
        logprobs = _column(data, "logprobs", "<f4")
        top_ids = _column(data, "top_ids", "<i4")
        top_logprobs = _column(data, "top_logprobs", "<f4")
        num_top = int(counts.sum(dtype=np.int64))
        lengths = (len(rows), len(logprobs), len(counts), len(top_ids), len(top_logprobs))
        if lengths != (len(rows),) * 3 + (num_top,) * 2 or (counts < 0).any():
            raise DecodeError(f"columns of {lengths} numbers do not match")
        return LogprobColumns(rows, logprobs, counts, top_ids, top_logprobs)


def _packed(numbers: Any, dtype: str) -> bytes:
    return np.asarray(numbers, dtype=dtype).tobytes()


def _column(data: dict[Any, Any], name: str, dtype: str) -> npt.NDArray[Any]:
    column = data.get(name)
    if not isinstance(column, bytes) or len(column) % 4:
        raise DecodeError(f"column {name!r}: expected packed {dtype}, got {column!r:.80}")
    return np.frombuffer(column, dtype=dtype)


LogprobList = Annotated[Sequence[TokenLogprobs], _Wire()]
"""Log-probabilities of any number of positions, in columns on the wire."""
