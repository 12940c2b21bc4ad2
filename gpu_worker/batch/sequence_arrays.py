"""State of the resident sequences, in arrays indexed by *slot*: a place in the batch.

A KV slot is something else: the place of a token in the KV pool (see ``slot_mapping``).
"""

import typing
from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from gpu_worker.batch.plan_checks import Limits
from shared.messages.plans import Admission
from shared.sampling import PARAMETERS

_FIRST_CAPACITY = 64
NO_TOKEN = -1  # pads rows of token ids; no token has this id

Slots = npt.NDArray[np.int64]


class SlotArrays:
    """Columns, block tables and end tokens by slot. A subclass maps sequences to slots.

    A column is a field with an annotation: its type, and the value of a free slot. Sampling
    parameters have columns of their names, see ``shared.sampling``.

    Args:
        limits: of the model and the pool.
    """

    taken: Annotated[npt.NDArray[np.bool_], False]
    handle: Annotated[npt.NDArray[np.int32], 0]
    choice: Annotated[npt.NDArray[np.int64], 0]
    last_token: Annotated[npt.NDArray[np.int64], 0]
    num_tokens: Annotated[npt.NDArray[np.int64], 0]  # prompt and output
    num_computed: Annotated[npt.NDArray[np.int64], 0]  # tokens with K/V
    block_capacity: Annotated[npt.NDArray[np.int64], 0]  # tokens that the block table has room for
    num_prompt_tokens: Annotated[npt.NDArray[np.int64], 0]
    min_length: Annotated[npt.NDArray[np.int64], 0]  # shorter ones do not end by a token
    max_length: Annotated[npt.NDArray[np.int64], 0]
    decodes: Annotated[npt.NDArray[np.bool_], False]
    ended: Annotated[npt.NDArray[np.bool_], False]
    penalized: Annotated[npt.NDArray[np.bool_], False]  # its logits are changed, see ``Penalties``
    has_grammar: Annotated[npt.NDArray[np.bool_], False]
    wants_logprobs: Annotated[npt.NDArray[np.bool_], False]
    num_logprobs: Annotated[npt.NDArray[np.int64], 0]
    beam_width: Annotated[npt.NDArray[np.int64], 0]  # of its group; 0: it is no beam

    # Columns of sampling parameters that are read by name.
    temperature: npt.NDArray[np.float32]  # 0 if greedy
    seed: npt.NDArray[np.uint64]
    ignore_eos: npt.NDArray[np.bool_]

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._shift = limits.kv.block_size.bit_length() - 1

    def reset(self) -> None:
        """All slots are free."""
        limits = self.limits
        for name, (dtype, value) in _COLUMNS.items():
            setattr(self, name, np.full(_FIRST_CAPACITY, value, dtype))
        self.block_tables = np.zeros((_FIRST_CAPACITY, limits.max_blocks), np.int32)
        # End-of-sequence tokens first, then the request's own; padded with NO_TOKEN.
        self.end_tokens = np.empty((_FIRST_CAPACITY, len(limits.eos_token_ids)), np.int64)
        self._free = list(range(_FIRST_CAPACITY - 1, -1, -1))

    def take_slot(self) -> int:
        """Take a free slot; if there is none, the number of slots doubles."""
        if not self._free:
            self._enlarge()
        slot = self._free.pop()
        self.taken[slot] = True
        return slot

    def free_slot(self, slot: int) -> None:
        """Make a slot free for another sequence."""
        self.taken[slot] = False
        self.decodes[slot] = False
        self._free.append(slot)

    def next_slots(self, freed: Iterable[int] = ()) -> list[int]:
        """Slots in the order in which they would be taken, last first, once ``freed`` are free."""
        return [*self._free, *freed]

    def fill(self, slot: int, new: Admission) -> None:
        """Set the state of an admitted sequence."""
        sampling = new.sampling
        num_blocks = len(new.block_table)
        self.block_tables[slot, :num_blocks] = new.block_table
        self.handle[slot] = new.handle
        self.choice[slot] = new.choice
        self.last_token[slot] = new.tokens[-1]
        self.num_tokens[slot] = len(new.tokens)
        self.num_computed[slot] = new.num_computed
        self.block_capacity[slot] = num_blocks << self._shift
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self.min_length[slot] = new.num_prompt_tokens + sampling.min_tokens
        self.max_length[slot] = min(
            new.num_prompt_tokens + sampling.max_tokens, self.limits.max_model_len
        )
        self.decodes[slot] = False
        self.ended[slot] = False
        for name in _PARAMETER_COLUMNS:
            getattr(self, name)[slot] = getattr(sampling, name)
        if sampling.is_greedy:
            self.temperature[slot] = 0
        self.penalized[slot] = sampling.changes_logits
        self.has_grammar[slot] = new.has_grammar
        self.wants_logprobs[slot] = sampling.num_logprobs is not None
        self.num_logprobs[slot] = sampling.num_logprobs or 0
        self.beam_width[slot] = 0 if sampling.beams is None else sampling.beams.width
        self._set_end_tokens(slot, sampling.stop_token_ids)

    def copy_slots(self, sources: int | Slots, targets: int | Slots) -> None:
        """Make each target equal to its source; no slot is both."""
        for name in _COLUMNS:
            column = getattr(self, name)
            column[targets] = column[sources]
        self.block_tables[targets] = self.block_tables[sources]
        self.end_tokens[targets] = self.end_tokens[sources]

    def ends_of(self, slot: int) -> Slots:
        """Tokens that end the sequence in a slot, [n] ascending."""
        ends = self.end_tokens[slot]
        if self.ignore_eos[slot]:
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
        for name, (dtype, value) in _COLUMNS.items():
            more: npt.NDArray[Any] = np.full(capacity, value, dtype)
            setattr(self, name, np.concatenate([getattr(self, name), more]))
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)])
        self.end_tokens = np.concatenate([self.end_tokens, np.empty_like(self.end_tokens)])
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))


def _columns() -> dict[str, tuple[type, Any]]:
    """Type of the elements, and value of a free slot, by column."""
    found: dict[str, tuple[type, Any]] = {}
    for name, hint in typing.get_type_hints(SlotArrays, include_extras=True).items():
        if typing.get_origin(hint) is Annotated:
            _, dtype = typing.get_args(hint.__origin__)
            found[name] = (*typing.get_args(dtype), *hint.__metadata__)
    for name, parameter in PARAMETERS.items():
        if parameter.column is not None:
            found[name] = (parameter.column, parameter.neutral)
    return found


_PARAMETER_COLUMNS = tuple(name for name, each in PARAMETERS.items() if each.column is not None)
_COLUMNS = _columns()
