"""The resident sequences, in arrays, and how plans change them.

A plan is a difference: sequences that only decode are not in it. So what they cost here must not be
interpreted work: every array is indexed by *slot*, and a step takes all decoding slots at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_worker.rows import ChunkRows, Rows
from shared.codec import IntArray
from shared.errors import PageStreamError
from shared.messages import Admission, EndFlag, KVGeometry, StepPlan

_FIRST_CAPACITY = 64
_NO_TOKEN = -1  # pads rows of token ids; no token has this id

Slots = npt.NDArray[np.int64]


class PlanRefused(PageStreamError):
    """A plan does not fit the sequences that this worker holds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What sequences may be."""

    kv: KVGeometry
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


# Columns by slot: name, type, value of an unused slot.
_COLUMNS: tuple[tuple[str, type, Any], ...] = (
    ("handle", np.int32, 0),
    ("choice", np.int64, 0),
    ("seed", np.uint64, 0),
    ("last_token", np.int64, 0),
    ("num_tokens", np.int64, 0),  # prompt and output
    ("num_computed", np.int64, 0),  # tokens with K/V
    ("num_slots", np.int64, 0),  # tokens that the block table has room for
    ("num_prompt_tokens", np.int64, 0),
    ("min_length", np.int64, 0),  # up to here neither end-of-sequence nor stop tokens
    ("max_length", np.int64, 0),
    ("decodes", np.bool_, False),
    ("ended", np.bool_, False),
    ("ignores_eos", np.bool_, False),
    ("temperature", np.float32, 0.0),
    ("top_k", np.int64, 0),
    ("top_p", np.float32, 1.0),
    ("min_p", np.float32, 0.0),
    ("wants_logprobs", np.bool_, False),
    ("num_logprobs", np.int64, 0),
)


class BatchState:
    """Sequences by slot.

    Args:
        limits: of the model and the pool.
    """

    handle: npt.NDArray[np.int32]
    choice: npt.NDArray[np.int64]
    seed: npt.NDArray[np.uint64]
    last_token: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    num_computed: npt.NDArray[np.int64]
    num_slots: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int64]
    min_length: npt.NDArray[np.int64]
    max_length: npt.NDArray[np.int64]
    decodes: npt.NDArray[np.bool_]
    ended: npt.NDArray[np.bool_]
    ignores_eos: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    wants_logprobs: npt.NDArray[np.bool_]
    num_logprobs: npt.NDArray[np.int64]

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._shift = limits.kv.block_size.bit_length() - 1
        self._max_blocks = -(-limits.max_model_len // limits.kv.block_size)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence."""
        self._slot_of: dict[int, int] = {}
        self._tokens: dict[int, IntArray] = {}  # by slot, those still needed
        self._prompt_logprobs: dict[int, int] = {}  # by slot: how many top ones
        for name, dtype, value in _COLUMNS:
            setattr(self, name, np.full(_FIRST_CAPACITY, value, dtype))
        self._tables = np.zeros((_FIRST_CAPACITY, self._max_blocks), np.int32)
        # End-of-sequence tokens first, then the request's own; padded with _NO_TOKEN.
        self.end_tokens = np.empty((_FIRST_CAPACITY, len(self._limits.eos_token_ids)), np.int64)
        self._free = list(range(_FIRST_CAPACITY - 1, -1, -1))
        self.version = 0  # changes whenever the set of decoding slots may have changed
        self._decoding: Slots = np.empty(0, np.int64)
        self._decoding_version = -1

    def __len__(self) -> int:
        return len(self._slot_of)

    # -------------------------------------------------------------------- plans

    def apply(self, plan: StepPlan) -> None:
        """Retire, admit and grow.

        Raises:
            PlanRefused: the plan speaks of sequences or blocks that cannot be.
        """
        for handle in plan.retired.tolist():
            self._retire(handle)
        for admission in plan.admissions:
            self._admit(admission)
        for handle, block in _pairs(plan.grown_handles, plan.grown_blocks):
            self._grow(handle, block)

    def rows(self, plan: StepPlan) -> Rows:
        """What the plan computes: one row per decoding sequence, then the chunks.

        Raises:
            PlanRefused: a chunk or a decoding sequence does not fit its tokens or its blocks.
        """
        decoding = self._decoding_slots()
        positions = self.num_computed[decoding]
        if (positions >= self.num_slots[decoding]).any():
            raise PlanRefused("a decoding sequence has no room in its blocks")
        chunks = self._chunks(plan)
        rows = Rows(
            slots=decoding,
            token_ids=self.last_token[decoding],
            positions=positions,
            slot_mapping=self._slot_mapping(decoding, positions),
            sizes=None,
            chunks=chunks,
            sampled=decoding,
            sample_rows=None,
            version=self.version,
        )
        return self._with_chunks(rows, chunks) if chunks else rows

    def tables(self, slots: Slots, num_blocks: int) -> npt.NDArray[np.int32]:
        """The first columns of the block tables, [S, num_blocks]."""
        return np.take(self._tables[:, :num_blocks], slots, axis=0)

    def complete(
        self, rows: Rows, tokens: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Note what a step computed and sampled, tokens [R].

        Returns rows of the sample that ended [n], and their EndFlags [n].
        """
        if rows.sizes is None:
            self.num_computed[rows.slots] += 1
        else:
            self.num_computed[rows.slots] += rows.sizes
        slots = rows.sampled
        self.last_token[slots] = tokens
        self.num_tokens[slots] += 1
        for chunk in rows.chunks:
            if chunk.samples:
                self.decodes[chunk.slot] = True
                self._tokens.pop(chunk.slot)
                self.version += 1
        flags = self._end_flags(slots, tokens)
        ended = flags.nonzero()[0]
        if len(ended):
            self.ended[slots[ended]] = True
            self.version += 1
        return ended, flags[ended]

    def _end_flags(self, slots: Slots, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """An EndFlag for each sampled token [R], 0 for those that go on."""
        flags = np.zeros(len(slots), np.int32)
        flags[self.num_tokens[slots] >= self.max_length[slots]] = EndFlag.LENGTH
        hits = self.end_tokens[slots] == tokens[:, None]
        num_eos = len(self._limits.eos_token_ids)
        stops = hits[:, num_eos:].any(1)
        stops |= hits[:, :num_eos].any(1) & ~self.ignores_eos[slots]
        flags[stops] = EndFlag.STOP
        return flags

    # ---------------------------------------------------------------- sequences

    def _retire(self, handle: int) -> None:
        slot = self._slot_of.pop(handle, None)
        if slot is None:
            raise PlanRefused(f"unknown sequence {handle} is retired")
        self._tokens.pop(slot, None)
        self._prompt_logprobs.pop(slot, None)
        self.decodes[slot] = False
        self._free.append(slot)
        self.version += 1

    def _admit(self, new: Admission) -> None:
        self._check_admission(new)
        if not self._free:
            self._enlarge()
        slot = self._free.pop()
        self._slot_of[new.handle] = slot
        self._tokens[slot] = new.tokens
        sampling = new.sampling
        num_blocks = len(new.block_table)
        self._tables[slot, :num_blocks] = new.block_table
        self.handle[slot] = new.handle
        self.choice[slot] = new.choice
        self.seed[slot] = sampling.seed
        self.last_token[slot] = new.tokens[-1]
        self.num_tokens[slot] = len(new.tokens)
        self.num_computed[slot] = new.num_computed
        self.num_slots[slot] = num_blocks << self._shift
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self.min_length[slot] = new.num_prompt_tokens + sampling.min_tokens
        self.max_length[slot] = min(
            new.num_prompt_tokens + sampling.max_tokens, self._limits.max_model_len
        )
        self.decodes[slot] = False
        self.ended[slot] = False
        self.ignores_eos[slot] = sampling.ignore_eos
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.wants_logprobs[slot] = sampling.num_logprobs is not None
        self.num_logprobs[slot] = sampling.num_logprobs or 0
        if sampling.num_prompt_logprobs is not None:
            self._prompt_logprobs[slot] = sampling.num_prompt_logprobs
        self._set_end_tokens(slot, sampling.stop_token_ids)

    def _check_admission(self, new: Admission) -> None:
        where = f"admission of {new.handle}"
        if new.handle in self._slot_of:
            raise PlanRefused(f"{where}: it is here already")
        if not 0 <= new.num_computed < len(new.tokens):
            raise PlanRefused(f"{where}: {new.num_computed} of {len(new.tokens)} tokens computed")
        if len(new.tokens) >= self._limits.max_model_len:
            raise PlanRefused(f"{where}: {len(new.tokens)} tokens leave no room in the context")
        if new.tokens.min() < 0 or new.tokens.max() >= self._limits.vocab_size:
            raise PlanRefused(f"{where}: a token is outside the vocabulary")
        if len(new.block_table) > self._max_blocks:
            raise PlanRefused(f"{where}: {len(new.block_table)} blocks are more than it can fill")
        for block in (new.block_table.min(initial=0), new.block_table.max(initial=0)):
            self._check_block(int(block))

    def _check_block(self, block: int) -> None:
        if not 0 <= block < self._limits.kv.num_blocks:
            raise PlanRefused(f"there is no block {block}")

    def _set_end_tokens(self, slot: int, stop_token_ids: tuple[int, ...]) -> None:
        ids = (*self._limits.eos_token_ids, *stop_token_ids)
        width = self.end_tokens.shape[1]
        if len(ids) > width:
            more = ((0, 0), (0, len(ids) - width))
            self.end_tokens = np.pad(self.end_tokens, more, constant_values=_NO_TOKEN)
        self.end_tokens[slot] = _NO_TOKEN
        self.end_tokens[slot, : len(ids)] = ids

    def _grow(self, handle: int, block: int) -> None:
        slot = self._slot(handle)
        if self.ended[slot]:
            return  # planned before the end was known
        self._check_block(block)
        column = int(self.num_slots[slot]) >> self._shift
        if column == self._max_blocks:
            raise PlanRefused(f"sequence {handle} grows beyond the model's context")
        self._tables[slot, column] = block
        self.num_slots[slot] += self._limits.kv.block_size

    def _slot(self, handle: int) -> int:
        slot = self._slot_of.get(handle)
        if slot is None:
            raise PlanRefused(f"sequence {handle} is unknown")
        return slot

    def _enlarge(self) -> None:
        """Twice as many slots."""
        capacity = len(self.handle)
        for name, dtype, value in _COLUMNS:
            more: npt.NDArray[Any] = np.full(capacity, value, dtype)
            setattr(self, name, np.concatenate([getattr(self, name), more]))
        self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)])
        self.end_tokens = np.concatenate([self.end_tokens, np.empty_like(self.end_tokens)])
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))

    # --------------------------------------------------------------------- rows

    def _decoding_slots(self) -> Slots:
        if self._decoding_version != self.version:
            self._decoding = np.flatnonzero(self.decodes & ~self.ended)
            self._decoding_version = self.version
        return self._decoding

    def _chunks(self, plan: StepPlan) -> tuple[ChunkRows, ...]:
        if not len(plan.chunk_handles):
            return ()
        chunks: dict[int, ChunkRows] = {}
        for handle, size in _pairs(plan.chunk_handles, plan.chunk_tokens):
            slot = self._slot(handle)
            if self.ended[slot]:
                continue
            start = int(self.num_computed[slot])
            stop = start + size
            if size < 1 or slot in chunks or self.decodes[slot]:
                raise PlanRefused(f"sequence {handle} has no chunk of {size} tokens to compute")
            if stop > min(self.num_tokens[slot], self.num_slots[slot]):
                raise PlanRefused(f"sequence {handle} has no tokens or blocks up to {stop}")
            chunks[slot] = ChunkRows(
                slot=slot,
                handle=handle,
                tokens=self._tokens[slot],
                start=start,
                stop=stop,
                num_prompt_tokens=int(self.num_prompt_tokens[slot]),
                num_prompt_logprobs=self._prompt_logprobs.get(slot),
            )
        return tuple(chunks.values())

    def _slot_mapping(self, slots: Any, positions: npt.NDArray[np.int64]) -> Slots:
        """Where the K/V of tokens [n] go; ``slots`` is [n] or one slot for all."""
        block_size = self._limits.kv.block_size
        blocks = self._tables[slots, positions >> self._shift].astype(np.int64)
        mapping: Slots = (blocks << self._shift) + (positions & (block_size - 1))
        return mapping

    def _with_chunks(self, decoding: Rows, chunks: tuple[ChunkRows, ...]) -> Rows:
        spans = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
        mapped = [
            self._slot_mapping(chunk.slot, span) for chunk, span in zip(chunks, spans, strict=True)
        ]
        num_decoding = len(decoding.slots)
        sizes = np.ones(num_decoding + len(chunks), np.int64)
        sizes[num_decoding:] = [chunk.size for chunk in chunks]
        ends = sizes.cumsum()
        sampling = np.array([chunk.samples for chunk in chunks])
        samples = np.concatenate([np.ones(num_decoding, np.bool_), sampling])
        slots = np.concatenate([decoding.slots, [chunk.slot for chunk in chunks]])
        return Rows(
            slots=slots,
            token_ids=np.concatenate([decoding.token_ids, *(c.token_ids for c in chunks)]),
            positions=np.concatenate([decoding.positions, *spans]),
            slot_mapping=np.concatenate([decoding.slot_mapping, *mapped]),
            sizes=sizes,
            chunks=chunks,
            sampled=slots[samples],
            sample_rows=ends[samples] - 1,
            version=self.version,
        )


def _pairs(first: IntArray, second: IntArray) -> Iterator[tuple[int, int]]:
    """Entries of two arrays of a plan that belong together."""
    if len(first) != len(second):
        raise PlanRefused(f"arrays of {len(first)} and {len(second)} entries belong together")
    return zip(first.tolist(), second.tolist(), strict=True)
