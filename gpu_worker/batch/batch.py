"""Applies plans to the resident sequences, and computes the rows of steps.

A plan is a difference: it does not name sequences that only decode. So they must not cost
interpreted work either: every array is indexed by *slot*, and a step takes all decoding slots at
once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpu_worker.batch.beams import beam_rows, continue_beams
from gpu_worker.batch.plan_checks import (
    Limits,
    PlanRefused,
    check_admission,
    check_block,
    check_copies,
    check_swaps,
)
from gpu_worker.batch.rows import ChunkRows, Forks, Rows
from gpu_worker.batch.sequence_arrays import NO_TOKEN, SlotArrays, Slots
from shared.codec import IntArray
from shared.messages.endings import EndFlag
from shared.messages.plans import Admission, StepPlan


class BatchState(SlotArrays):
    """Maps sequences to slots, and changes their state by plans and steps.

    Args:
        limits: of the model and the pool.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.reset()

    def reset(self) -> None:
        """Remove every sequence."""
        super().reset()
        self._slot_of: dict[int, int] = {}
        self._tokens: dict[int, IntArray] = {}  # by slot, of sequences that do not decode
        self._prompt_logprobs: dict[int, int] = {}  # by slot: number of top ones
        self.version = 0  # changes whenever the set of decoding slots may have changed
        self._decoding: Slots = np.empty(0, np.int64)
        self._decoding_version = -1
        self._ends: _Ends | None = None  # of the decoding sequences

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot_of(self, handle: int) -> int | None:
        """Slot of a sequence; None: it is not resident."""
        return self._slot_of.get(handle)

    # -------------------------------------------------------------------- plans

    def apply(self, plan: StepPlan) -> None:
        """Retire, continue beams, replace copied blocks, admit, grow and fork.

        Forks come last, so that children get the blocks that the plan adds to their parents'
        tables. The caller swaps and copies the blocks themselves.

        Raises:
            PlanRefused: a sequence or a block of the plan is not valid.
        """
        check_swaps(plan, self.limits)
        for handle in plan.retired.tolist():
            self._retire(handle)
        if plan.beams:
            continue_beams(plan.beams, self, self._slot_of)
        self._replace(plan)
        for admission in plan.admissions:
            self._admit(admission)
        for handle, block in _tuples(plan.grown_handles, plan.grown_blocks):
            self._grow(handle, block)
        for parent, child, choice in _tuples(
            plan.fork_parents, plan.fork_children, plan.fork_choices
        ):
            self._fork(parent, child, choice)

    def rows(self, plan: StepPlan) -> Rows:
        """The rows of a plan: one per decoding sequence, then the chunks.

        Raises:
            PlanRefused: a chunk or a decoding sequence does not fit its tokens or its blocks, a
                parent does not sample, or a beam computes its last token without its group.
        """
        decoding = self._decoding_slots()
        positions = self.num_computed[decoding]
        if (positions >= self.block_capacity[decoding]).any():
            raise PlanRefused("a decoding sequence has no room in its blocks")
        chunks = self._chunks(plan)
        rows = Rows(
            slots=decoding,
            positions=positions,
            slot_mapping=self._slot_mapping(decoding, positions),
            sizes=None,
            chunks=chunks,
            sampled=decoding,
            sample_rows=None,
            forks=None,
            beams=(),
            version=self.version,
        )
        if chunks:
            rows = self._with_chunks(rows, chunks)
        if plan.beams or any(chunk.is_beam for chunk in chunks):
            rows = replace(rows, beams=beam_rows(plan.beams, rows, self, self._slot_of))
        return self._with_forks(rows, plan) if len(plan.fork_children) else rows

    def advance(self, rows: Rows) -> "Advanced":
        """Advance the sequences of a step before its tokens are known.

        Sequences that reach a length limit end here; other ends depend on the tokens, see
        ``settle``.
        """
        if rows.sizes is None:
            self.num_computed[rows.slots] = rows.positions + 1
        else:
            self.num_computed[rows.slots] += rows.sizes
        slots = rows.sampled
        num_tokens = self.num_tokens[slots] + 1
        self.num_tokens[slots] = num_tokens
        for chunk in rows.chunks:
            if chunk.reaches_last:
                self._tokens.pop(chunk.slot, None)
            if chunk.samples:
                self.decodes[chunk.slot] = True
                self.version += 1
        if (forks := rows.forks) is not None:
            self.num_computed[forks.children] = self.num_computed[forks.parents]
            self.decodes[forks.children] = True
            self.version += 1
        ends = self._ends_of(rows)
        full = num_tokens >= ends.max_length
        if full.any():
            self.ended[slots[full]] = True
            self.version += 1
        return Advanced(slots, ends.handles, full, ends.tokens)

    def settle(
        self,
        advanced: "Advanced",
        tokens: npt.NDArray[np.int64],
        failed: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.int32]:
        """End sequences by their tokens [R]; returns an EndFlag for each, 0: it continues.

        Plans may have been applied since ``advance``: a slot may hold another sequence by now.

        Args:
            failed: rows that end whatever their tokens are; None: none.
        """
        flags = np.zeros(len(tokens), np.int32)
        flags[advanced.full] = EndFlag.LENGTH
        stops = (advanced.end_tokens == tokens[:, None]).any(1)
        if failed is not None:
            stops[failed] = True
        if stops.any():
            flags[stops] = EndFlag.STOP
            if failed is not None:
                flags[failed] = EndFlag.ERROR
            slots = advanced.slots[stops]
            here = self.taken[slots] & (self.handle[slots] == advanced.handles[stops])
            self.ended[slots[here]] = True
            self.version += 1
        return flags

    def _ends_of(self, rows: Rows) -> "_Ends":
        """What ends the sequences that sample; cached while the decoding sequences stay."""
        known = self._ends
        if known is not None and rows.only_decodes and known.version == rows.version:
            return known
        slots = rows.sampled
        tokens = self.end_tokens[slots]
        tokens[self.ignore_eos[slots], : len(self.limits.eos_token_ids)] = NO_TOKEN
        found = _Ends(rows.version, self.handle[slots], self.max_length[slots], tokens)
        self._ends = found if rows.only_decodes else None
        return found

    # ---------------------------------------------------------------- sequences

    def _retire(self, handle: int) -> None:
        slot = self._slot_of.pop(handle, None)
        if slot is None:
            raise PlanRefused(f"unknown sequence {handle} is retired")
        self._tokens.pop(slot, None)
        self._prompt_logprobs.pop(slot, None)
        if self.decodes[slot]:
            self.version += 1
        self.free_slot(slot)

    def _admit(self, new: Admission) -> None:
        if new.handle in self._slot_of:
            raise PlanRefused(f"admission of {new.handle}: it is here already")
        check_admission(new, self.limits)
        slot = self.take_slot()
        self.fill(slot, new)
        self._slot_of[new.handle] = slot
        self._tokens[slot] = new.tokens
        # The choices of a request have the same prompt: the first one reports on it.
        if new.sampling.num_prompt_logprobs is not None and new.choice == 0:
            self._prompt_logprobs[slot] = new.sampling.num_prompt_logprobs

    def _fork(self, parent: int, child: int, choice: int) -> None:
        if child in self._slot_of:
            raise PlanRefused(f"fork of {parent}: {child} is here already")
        original = self._slot(parent)
        if choice < 0 or choice == self.choice[original]:
            raise PlanRefused(f"fork of {parent}: it cannot have choice {choice}")
        slot = self.take_slot()
        self.copy_slots(original, slot)
        self.handle[slot] = child
        self.choice[slot] = choice
        self.decodes[slot] = False  # from the next step on
        self._slot_of[child] = slot

    def _replace(self, plan: StepPlan) -> None:
        """Replace blocks by their copies in block tables."""
        check_copies(plan, self.limits)
        replaced = _tuples(
            plan.replaced_handles, plan.replaced_columns, plan.copy_sources, plan.copy_targets
        )
        for handle, column, source, target in replaced:
            slot = self._slot(handle)
            if self.ended[slot]:
                continue  # planned before the end was known
            if not 0 <= column < int(self.block_capacity[slot]) >> self._shift:
                raise PlanRefused(f"sequence {handle} has no block at {column} to replace")
            if self.block_tables[slot, column] != source:
                raise PlanRefused(f"sequence {handle} does not have block {source} at {column}")
            self.block_tables[slot, column] = target

    def _grow(self, handle: int, block: int) -> None:
        slot = self._slot(handle)
        if self.ended[slot]:
            return  # planned before the end was known
        check_block(block, self.limits)
        column = int(self.block_capacity[slot]) >> self._shift
        if column == self.block_tables.shape[1]:
            raise PlanRefused(f"sequence {handle} grows beyond the model's context")
        self.block_tables[slot, column] = block
        self.block_capacity[slot] += self.limits.kv.block_size

    def _slot(self, handle: int) -> int:
        slot = self._slot_of.get(handle)
        if slot is None:
            raise PlanRefused(f"sequence {handle} is unknown")
        return slot

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
        for handle, size in _tuples(plan.chunk_handles, plan.chunk_tokens):
            slot = self._slot(handle)
            if self.ended[slot]:
                continue
            start = int(self.num_computed[slot])
            stop = start + size
            if size < 1 or slot in chunks or self.decodes[slot]:
                raise PlanRefused(f"sequence {handle} has no chunk of {size} tokens to compute")
            if stop > min(self.num_tokens[slot], self.block_capacity[slot]):
                raise PlanRefused(f"sequence {handle} has no tokens or blocks up to {stop}")
            chunks[slot] = ChunkRows(
                slot=slot,
                handle=handle,
                tokens=self._pending(slot),
                start=start,
                stop=stop,
                num_prompt_tokens=int(self.num_prompt_tokens[slot]),
                num_prompt_logprobs=self._prompt_logprobs.get(slot),
                is_beam=bool(self.beam_width[slot]),
            )
        return tuple(chunks.values())

    def _pending(self, slot: int) -> IntArray:
        """Tokens that are not computed yet, of a sequence that does not decode."""
        tokens = self._tokens.get(slot)
        if tokens is None:
            if not self.beam_width[slot]:
                raise PlanRefused(f"sequence {self.handle[slot]} is forked, but has a chunk")
            # A beam that was computed before has one new token.
            return self.last_token[slot : slot + 1].astype(np.int32)
        return tokens[self.num_computed[slot] :]

    def _slot_mapping(self, slots: Slots, positions: npt.NDArray[np.int64]) -> Slots:
        """KV slots of tokens [n]: block id * block size + offset."""
        block_size = self.limits.kv.block_size
        blocks = self.block_tables[slots, positions >> self._shift].astype(np.int64)
        mapping: Slots = (blocks << self._shift) + (positions & (block_size - 1))
        return mapping

    def _with_chunks(self, decoding: Rows, chunks: tuple[ChunkRows, ...]) -> Rows:
        num_decoding = len(decoding.slots)
        sizes = np.ones(num_decoding + len(chunks), np.int64)
        sizes[num_decoding:] = [chunk.size for chunk in chunks]
        ends = sizes.cumsum()
        first = np.concatenate([decoding.positions, [chunk.start for chunk in chunks]])
        positions = np.repeat(first + sizes - ends, sizes) + np.arange(ends[-1])
        sampling = np.array([chunk.samples for chunk in chunks])
        samples = np.concatenate([np.ones(num_decoding, np.bool_), sampling])
        slots = np.concatenate([decoding.slots, [chunk.slot for chunk in chunks]])
        return Rows(
            slots=slots,
            positions=positions,
            slot_mapping=self._slot_mapping(np.repeat(slots, sizes), positions),
            sizes=sizes,
            chunks=chunks,
            sampled=slots[samples],
            sample_rows=ends[samples] - 1,
            forks=None,
            beams=(),
            version=self.version,
        )

    def _with_forks(self, rows: Rows, plan: StepPlan) -> Rows:
        parents = np.array([self._slot_of[handle] for handle in plan.fork_parents.tolist()])
        children = np.array([self._slot_of[handle] for handle in plan.fork_children.tolist()])
        num_own = len(rows.sampled)
        place = np.full(len(self.handle), -1, np.int64)  # by slot, in rows.sampled
        place[rows.sampled] = np.arange(num_own)
        if (place[parents] < 0).any():
            idle = self.handle[parents[place[parents] < 0]].tolist()
            raise PlanRefused(f"sequences {idle} have forks, but do not sample in this step")
        return replace(
            rows,
            sampled=np.concatenate([rows.sampled, children]),
            forks=Forks(parents, children, np.concatenate([np.arange(num_own), place[parents]])),
        )


@dataclass(frozen=True, slots=True)
class Advanced:
    """The sampling rows of a step, as they were when it began."""

    slots: Slots  # [R]
    handles: npt.NDArray[np.int32]  # [R]
    full: npt.NDArray[np.bool_]  # [R] the token is the last within the length limit
    end_tokens: npt.NDArray[np.int64]  # [R, E] tokens that end the sequence


@dataclass(frozen=True, slots=True)
class _Ends:
    """Length limits and end tokens of R sequences; valid for one version of the batch."""

    version: int
    handles: npt.NDArray[np.int32]  # [R]
    max_length: npt.NDArray[np.int64]  # [R]
    tokens: npt.NDArray[np.int64]  # [R, E]


def _tuples(*arrays: IntArray) -> Iterator[tuple[int, ...]]:
    """Zip arrays of a plan that must have the same length."""
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise PlanRefused(f"arrays of {lengths} entries belong together")
    return zip(*(array.tolist() for array in arrays), strict=True)
