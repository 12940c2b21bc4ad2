"""Frames of an engine's view: the whole state, and compact differences, as JSON for browsers."""

import json
from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.codec import IntArray
from shared.engine_view.engine_view import EngineView
from shared.engine_view.sequences import RequestView
from shared.messages.snapshots import RequestPhase

FREE, USED, PREFIX, FORK, BEAM, CACHED = range(6)
"""Kinds of blocks: without content; of one sequence; shared by requests; by choices or beams of
one; findable in the prefix cache, but in no table."""
PINNED = 8
"""Added to the kind of a block whose content is pinned."""
_MOST_ROWS = 2_000  # requests in a snapshot; those that wait longest after the others are left out
_U8 = NDArray[np.uint8]
_U16 = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The pool, by block; [num_blocks] each.

    Attributes:
        owners: numbers of requests; of a shared block the last one's by admission; 0: none.
        references: tables that have the block.
        columns: the block's place in the owner's table.
        filled: slots with keys and values.
        kinds: see FREE.
        hosts: [num_host_blocks] owners in the host pool.
        num_references: of all tables.
        num_kv_tokens: in used blocks.
    """

    owners: IntArray
    columns: IntArray
    references: _U16
    filled: _U16
    kinds: _U8
    hosts: IntArray
    num_references: int
    num_kv_tokens: int

    @property
    def num_used(self) -> int:
        """Blocks in tables."""
        return int(np.count_nonzero(self.references))


def blocks_of(view: EngineView, before: Blocks | None) -> Blocks:
    """The pool of a view.

    Args:
        before: the pool a moment ago: what was full then and is free now is cached.
    """
    num_blocks, size = view.geometry.num_blocks, view.geometry.block_size
    sequences = [found for found in view.sequences.values() if len(found.table)]
    owners = np.zeros(num_blocks, np.int32)
    others = np.zeros(num_blocks, np.int32)  # the first owner of a block
    places = np.zeros(num_blocks, np.int32)
    filled = np.zeros(num_blocks, np.uint16)
    references = np.zeros(num_blocks, np.int64)
    searches = np.zeros(num_blocks, bool)
    if sequences:
        lengths = np.array([len(found.table) for found in sequences])
        tokens = np.array([found.num_kv_tokens(view.step) for found in sequences])
        numbers = np.array([found.request.number for found in sequences], np.int32)
        is_search = np.array([found.request.search != 0 for found in sequences])
        table = np.concatenate([found.table for found in sequences])
        columns = np.arange(len(table)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slots = np.clip(np.repeat(tokens, lengths) - columns * size, 0, size).astype(np.uint16)
        owner = np.repeat(numbers, lengths)
        references = np.bincount(table, minlength=num_blocks)
        owners[table], others[table[::-1]] = owner, owner[::-1]
        places[table] = columns
        filled[table], searches[table] = slots, np.repeat(is_search, lengths)
        is_shared = references[table] > 1
        np.maximum.at(filled, table[is_shared], slots[is_shared])
    is_used = references > 0
    if before is not None and len(before.filled) == num_blocks:
        released = (before.references > 0) & ~is_used
        view.is_cached |= released & (before.filled == size)
    view.is_cached &= ~is_used
    kinds = np.where(is_used, USED, FREE).astype(np.uint8)
    kinds[references > 1] = np.where(searches[references > 1], BEAM, FORK)
    kinds[(references > 1) & (owners != others)] = PREFIX
    kinds[view.is_cached] = CACHED
    filled[view.is_cached | (view.is_pinned & ~is_used)] = size
    num_kv_tokens = int(filled[is_used].sum(dtype=np.int64))
    kinds[view.is_pinned] += PINNED
    return Blocks(
        *(owners, places, np.minimum(references, 65_535).astype(np.uint16), filled, kinds),
        *(view.host_owners.copy(), int(references.sum()), num_kv_tokens),
    )


class FrameSource:
    """Makes the frames of one view after another.

    Attributes:
        frame_number: of the last difference.
        blocks: the pool in it.
    """

    def __init__(self) -> None:
        self.frame_number = 0
        self.blocks: Blocks | None = None
        self._view: EngineView | None = None
        self._num_marks = 0
        self._last_step = 0
        self._counts: list[int] = []
        self._snapshot = ""

    def advance(self, view: EngineView) -> str | None:
        """What has changed since the last call, as JSON; None if nothing has.

        A snapshot is needed instead where the view is another one.
        """
        is_new = view is not self._view
        before = None if is_new else self.blocks
        blocks = blocks_of(view, before)
        counts = counts_of(view, blocks)
        frame: dict[str, Any] = {}
        if before is not None:
            frame = _difference(before, blocks)
            if counts != self._counts:
                frame["counts"] = counts
            rows = [found.row() for found in view.changed.values()]
            if rows:
                frame["requests"] = rows
            if view.reuse.is_evicted.any():
                frame["evicted"] = view.reuse.is_evicted.nonzero()[0].tolist()
            frame |= self._news(view)
        self.blocks, self._counts, self._view = blocks, counts, view
        view.changed.clear()
        view.reuse.is_evicted[:] = False
        if not is_new and not frame:
            return None
        self._snapshot = ""
        self.frame_number += 1
        self._last_step = view.steps[-1][0] if view.steps else 0
        self._num_marks = view.num_marks
        if is_new:
            return self.snapshot()
        frame |= {"step": view.step, "at": view.now_ms}
        return _json(frame)

    def snapshot(self) -> str:
        """The state as of the last call of ``advance``, as JSON."""
        view, blocks = self._view, self.blocks
        if self._snapshot or view is None or blocks is None:
            return self._snapshot
        shown = view.geometry
        requests = sorted(view.requests.values(), key=_by_phase)[:_MOST_ROWS]
        self._snapshot = _json(
            {
                "epoch": view.epoch,
                "step": view.step,
                "at": view.now_ms,
                "num_blocks": shown.num_blocks,
                "block_size": shown.block_size,
                "num_host_blocks": shown.num_host_blocks,
                "max_num_sequences": shown.max_num_sequences,
                "token_budget": shown.max_num_batched_tokens,
                "watermark": shown.num_watermark_blocks,
                "preemption": shown.preemption,
                "owners": _packed(blocks.owners, "<i4"),
                "columns": _packed(blocks.columns, "<i4"),
                "references": _packed(blocks.references, "<u2"),
                "filled": _packed(blocks.filled, "<u2"),
                "kinds": _packed(blocks.kinds, "<u1"),
                "hosts": _packed(blocks.hosts, "<i4"),
                "requests": [found.row() for found in requests],
                "counts": self._counts,
                "steps": list(view.steps),
                "marks": [mark.row() for mark in view.marks],
            }
        )
        return self._snapshot

    def _news(self, view: EngineView) -> dict[str, Any]:
        news: dict[str, Any] = {}
        steps = [row for row in view.steps if row[0] > self._last_step]
        if steps:
            news["steps"] = steps
        num_marks = min(view.num_marks - self._num_marks, len(view.marks))
        if num_marks:
            news["marks"] = [mark.row() for mark in list(view.marks)[-num_marks:]]
        return news


def counts_of(view: EngineView, blocks: Blocks) -> list[int]:
    """Numbers of blocks by use, of tokens, and of requests by phase, as gauges have them.

    Returns:
        Blocks used, cached, pinned without use, free, saved by sharing; tokens in used blocks;
        requests waiting, running, preempted, swapped; since the view's snapshot, blocks found in
        the prefix cache, and evicted.
    """
    num_used = blocks.num_used
    num_cached = int(np.count_nonzero(view.is_cached & ~view.is_pinned))
    num_pinned = int(np.count_nonzero(view.is_pinned & (blocks.references == 0)))
    num_free = len(blocks.owners) - num_used - num_cached - num_pinned
    phases = view.phases
    return [
        *(num_used, num_cached, num_pinned, num_free),
        *(blocks.num_references - num_used, blocks.num_kv_tokens),
        phases[RequestPhase.WAITING],
        phases[RequestPhase.PREFILL] + phases[RequestPhase.DECODE],
        *(phases[RequestPhase.PREEMPTED], phases[RequestPhase.SWAPPED]),
        *(view.reuse.num_hits, view.reuse.num_evicted),
    ]


def _by_phase(request: RequestView) -> tuple[bool, bool, int]:
    is_ended = request.phase is RequestPhase.ENDED
    return is_ended, request.phase is RequestPhase.WAITING, request.accepted_ms


def _difference(before: Blocks, now: Blocks) -> dict[str, Any]:
    """Blocks that changed: their numbers, and what each of them is now."""
    frame: dict[str, Any] = {}
    changed = (before.owners != now.owners) | (before.references != now.references)
    changed |= (before.kinds != now.kinds) | (before.columns != now.columns)
    grown = ((before.filled != now.filled) & ~changed).nonzero()[0]
    blocks = changed.nonzero()[0]
    if len(blocks):
        values = (now.owners, now.columns, now.references, now.filled, now.kinds)
        frame["blocks"] = [blocks.tolist(), *(found[blocks].tolist() for found in values)]
    if len(grown):
        frame["filled"] = [grown.tolist(), now.filled[grown].tolist()]
    hosts = (before.hosts != now.hosts).nonzero()[0]
    if len(hosts):
        frame["hosts"] = [hosts.tolist(), now.hosts[hosts].tolist()]
    return frame


def _packed(values: NDArray[Any], dtype: str) -> str:
    return b64encode(values.astype(dtype).tobytes()).decode()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
