"""Changes the model's logits before a token is chosen: biases, and penalties on repetition.

In vLLM's order and with its meaning:

1. A bias is added.
2. Logits of tokens that are in the prompt or were generated are divided by the repetition penalty
   if positive, else multiplied (Keskar et al., CTRL, section 4.1; as in transformers).
3. The frequency penalty is subtracted for each time that a token was generated, and the presence
   penalty once, as OpenAI defines them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.rows import Indices
from gpu_worker.sampling import kernels
from shared.messages.plans import Admission, StepPlan
from shared.sampling import SamplingParams

# A count is 2 for each time that the token was generated, and 1 more if the prompt has it.
_IN_PROMPT = 1
_GENERATED = 2


@dataclass(frozen=True, slots=True)
class _Penalized:
    """A sequence with changed logits."""

    sampling: SamplingParams
    row: int | None  # of the counts; None: it has only biases


class Penalties:
    """Counts the tokens of the sequences whose logits are changed.

    Counts begin with the tokens of the admission; each chosen token adds to them. They are kept and
    updated on the device of the logits, in the order of steps. So a step may begin before the host
    has the tokens of the step before.

    Args:
        vocab_size: V.
        num_seqs: rows that are allocated with the first penalty; more sequences double them.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, num_seqs: int, device: torch.device) -> None:
        self.counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)  # [C, V]
        self.device = device
        self._first_rows = num_seqs
        self._sequences: dict[int, _Penalized] = {}  # by handle
        self._free: list[int] = []  # rows of the counts

    @property
    def num_rows(self) -> int:
        """Rows of the counts that are in use."""
        return self.counts.shape[0] - len(self._free)

    def allocate(self, num_rows: int) -> None:
        """Allocate counts for ``num_rows`` sequences; counts so far stay."""
        held, vocab_size = self.counts.shape
        more = self.counts.new_empty((num_rows - held, vocab_size))
        self.counts = torch.cat([self.counts, more]) if held else more

    def reset(self) -> None:
        """Remove every sequence."""
        self._sequences.clear()
        self._free = list(range(self.counts.shape[0]))

    def follow(self, plan: StepPlan) -> None:
        """Remove retired sequences, count the tokens of admitted ones, copy counts to forks."""
        if self._sequences:
            for handle in plan.retired.tolist():
                gone = self._sequences.pop(handle, None)
                if gone is not None and gone.row is not None:
                    self._free.append(gone.row)
        for new in plan.admissions:
            if new.sampling.changes_logits:
                self._admit(new)
        if self._sequences:
            forks = zip(plan.fork_parents.tolist(), plan.fork_children.tolist(), strict=True)
            for parent, child in forks:
                self._fork(parent, child)

    def rows(
        self,
        places: Indices,  # [P] rows of the logits
        handles: npt.NDArray[np.int32],  # [P] of their sequences
    ) -> "PenalizedRows | None":
        """Changes of these rows of a step; None if there are no rows."""
        if not len(places):
            return None
        known = [self._sequences[handle] for handle in handles.tolist()]
        counted = [index for index, of in enumerate(known) if of.row is not None]
        penalties = np.array(
            [
                (of.repetition_penalty, of.frequency_penalty, of.presence_penalty)
                for of in (known[index].sampling for index in counted)
            ],
            np.float32,
        ).reshape(-1, 3, 1)
        rows = [row for of in known if (row := of.row) is not None]
        return PenalizedRows(
            owner=self,
            places=self._on_device(places[counted]),
            rows=self._on_device(np.array(rows, np.int64)),
            penalties=self._on_device(penalties),
            biases=self._biases(places, [of.sampling for of in known]),
        )

    def _biases(
        self, places: Indices, sampling: Sequence[SamplingParams]
    ) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None":
        vocab_size = self.counts.shape[1]
        found = [
            (place, entry.token, entry.bias)
            for place, of in zip(places.tolist(), sampling, strict=True)
            for entry in of.logit_bias
            if 0 <= entry.token < vocab_size
        ]
        if not found:
            return None
        rows, tokens, biases = zip(*found, strict=True)
        return (
            self._on_device(np.array(rows, np.int64)),
            self._on_device(np.array(tokens, np.int64)),
            self._on_device(np.array(biases, np.float32)),
        )

    def _admit(self, new: Admission) -> None:
        row = None
        if new.sampling.has_penalty:
            row = self._take_row()
            tokens = self._on_device(new.tokens.astype(np.int64))
            prompt, generated = tokens[: new.num_prompt_tokens], tokens[new.num_prompt_tokens :]
            counts = self.counts[row]
            counts.zero_()
            counts.index_fill_(0, prompt, _IN_PROMPT)
            counts.index_add_(
                0, generated, torch.full_like(generated, _GENERATED, dtype=torch.int32)
            )
        self._sequences[new.handle] = _Penalized(new.sampling, row)

    def _fork(self, parent: int, child: int) -> None:
        original = self._sequences.get(parent)
        if original is None:
            return
        row = None
        if original.row is not None:
            row = self._take_row()
            self.counts[row].copy_(self.counts[original.row])
        self._sequences[child] = _Penalized(original.sampling, row)

    def _take_row(self) -> int:
        if not self._free:
            held = self.counts.shape[0]
            self.allocate(2 * held or self._first_rows)
            self._free = list(range(held, self.counts.shape[0]))
        return self._free.pop()

    def _on_device(self, numbers: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    """Changes of rows of a step's logits; the same object serves while the rows stay.

    Attributes:
        owner: of the counts.
        places: [P] int64, rows of the logits that have penalties.
        rows: [P] int64, rows of the counts.
        penalties: [P, 3, 1] float32: repetition, frequency, presence.
        biases: [B] int64 rows of the logits, [B] int64 tokens, and [B] float32 biases. No pair of
            row and token occurs twice.
    """

    owner: Penalties
    places: torch.Tensor
    rows: torch.Tensor
    penalties: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def changed(
        self,
        logits: torch.Tensor,  # [R, V]
    ) -> torch.Tensor:
        """Changed logits [R, V] in float32; in place if they were float32 before.

        They are not rounded back: logits that differ only by a penalty could become equal.
        """
        wide = logits.float()
        if self.biases is not None:
            rows, tokens, biases = self.biases
            wide[rows, tokens] += biases
        if wide.is_cuda:
            from kernels.triton.sampling import sampler  # an installation for CPUs has no Triton

            sampler.penalize(wide, self.places, self.owner.counts, self.rows, self.penalties)
        else:
            counts = self.owner.counts
            kernels.on_cpu().penalize(wide, self.places, counts, self.rows, self.penalties)
        return wide

    def count(
        self,
        tokens: torch.Tensor,  # [R] int64, chosen
    ) -> None:
        """Count the chosen token of each sequence with a penalty."""
        if len(self.rows):
            self.owner.counts[self.rows, tokens[self.places]] += _GENERATED
