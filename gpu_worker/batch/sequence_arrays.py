"""What a worker knows of each sequence, in arrays indexed by *slot*."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_worker.batch.plan_checks import Limits
from shared.messages.plans import Admission
from shared.sampling import SamplingParams

_FIRST_CAPACITY = 64
NO_TOKEN = -1  # pads rows of token ids; no token has this id

Slots = npt.NDArray[np.int64]

# Columns by slot: name, type, value of an unused slot.
_COLUMNS: tuple[tuple[str, type, Any], ...] = (
    ("taken", np.bool_, False),
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
    ("penalized", np.bool_, False),  # its logits are changed, see ``Penalties``
    ("wants_logprobs", np.bool_, False),
    ("num_logprobs", np.int64, 0),
    ("beam_width", np.int64, 0),  # of its group; 0: a sequence that decodes by itself
)


class SlotArrays:
    """Columns, block tables and end tokens by slot; who is where is the owner's to know.

    Args:
        limits: of the model and the pool.
    """

    taken: npt.NDArray[np.bool_]
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
    penalized: npt.NDArray[np.bool_]
    wants_logprobs: npt.NDArray[np.bool_]
    num_logprobs: npt.NDArray[np.int64]
    beam_width: npt.NDArray[np.int64]

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._shift = limits.kv.block_size.bit_length() - 1

    def reset(self) -> None:
        """All slots are free."""
        limits = self.limits
        for name, dtype, value in _COLUMNS:
            setattr(self, name, np.full(_FIRST_CAPACITY, value, dtype))
        self.block_tables = np.zeros((_FIRST_CAPACITY, limits.max_blocks), np.int32)
        # End-of-sequence tokens first, then the request's own; padded with NO_TOKEN.
        self.end_tokens = np.empty((_FIRST_CAPACITY, len(limits.eos_token_ids)), np.int64)
        self._free = list(range(_FIRST_CAPACITY - 1, -1, -1))

    def take_slot(self) -> int:
        """A free slot; there are twice as many once all are taken."""
        if not self._free:
            self._enlarge()
        slot = self._free.pop()
        self.taken[slot] = True
        return slot

    def free_slot(self, slot: int) -> None:
        """Nobody is in the slot any more."""
        self.taken[slot] = False
        self.decodes[slot] = False
        self._free.append(slot)

    def next_slots(self, freed: Iterable[int] = ()) -> list[int]:
        """Slots in the order in which they would be taken, last first, once ``freed`` are free."""
        return [*self._free, *freed]

    def fill(self, slot: int, new: Admission) -> None:
        """Write down all that an admission says."""
        sampling = new.sampling
        num_blocks = len(new.block_table)
        self.block_tables[slot, :num_blocks] = new.block_table
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
            new.num_prompt_tokens + sampling.max_tokens, self.limits.max_model_len
        )
        self.decodes[slot] = False
        self.ended[slot] = False
        self.ignores_eos[slot] = sampling.ignore_eos
        self.temperature[slot] = _temperature(sampling)
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.penalized[slot] = sampling.changes_logits
        self.wants_logprobs[slot] = sampling.num_logprobs is not None
        self.num_logprobs[slot] = sampling.num_logprobs or 0
        self.beam_width[slot] = 0 if sampling.beams is None else sampling.beams.width
        self._set_end_tokens(slot, sampling.stop_token_ids)

    def copy_slots(self, sources: int | Slots, targets: int | Slots) -> None:
        """Make each target equal to its source; no slot is both."""
        for name, _, _ in _COLUMNS:
            column = getattr(self, name)
            column[targets] = column[sources]
        self.block_tables[targets] = self.block_tables[sources]
        self.end_tokens[targets] = self.end_tokens[sources]

    def ends_of(self, slot: int) -> Slots:
        """The tokens that end the sequence in a slot, [n] ascending."""
        ends = self.end_tokens[slot]
        if self.ignores_eos[slot]:
            ends = ends[len(self.limits.eos_token_ids) :]
        return np.unique(ends[(ends >= 0) & (ends < self.limits.vocab_size)])

    def _set_end_tokens(self, slot: int, stop_token_ids: tuple[int, ...]) -> None:
        ids = (*self.limits.eos_token_ids, *stop_token_ids)
        width = self.end_tokens.shape[1]
        if len(ids) > width:
            more = ((0, 0), (0, len(ids) - width))
            self.end_tokens = np.pad(self.end_tokens, more, constant_values=NO_TOKEN)
        self.end_tokens[slot] = NO_TOKEN
        self.end_tokens[slot, : len(ids)] = ids

    def _enlarge(self) -> None:
        """Twice as many slots."""
        capacity = len(self.handle)
        for name, dtype, value in _COLUMNS:
            more: npt.NDArray[Any] = np.full(capacity, value, dtype)
            setattr(self, name, np.concatenate([getattr(self, name), more]))
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)])
        self.end_tokens = np.concatenate([self.end_tokens, np.empty_like(self.end_tokens)])
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))


def _temperature(sampling: SamplingParams) -> float:
    """What logits are divided by; 0 where the likeliest token is taken."""
    return 0.0 if sampling.is_greedy else sampling.temperature
