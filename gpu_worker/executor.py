"""Executes step plans on one model: plan in, result out, no bus."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.admissible import Limits
from gpu_worker.attention import PagedStep
from gpu_worker.batch import BatchState
from gpu_worker.candidates import beam_candidates
from gpu_worker.logprobs import prompt_logprobs, token_logprobs
from gpu_worker.memory import KVMemory
from gpu_worker.model import RaggedModel
from gpu_worker.rows import Indices, Rows
from gpu_worker.sampling import RowSampling, ban_ends, sample
from kernels.interface import AttentionBackend, RaggedBatch
from shared.codec import IntArray
from shared.logs import EventLog
from shared.messages import (
    BeamCandidates,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

log = EventLog(__name__)


class Executor:
    """One model, one pool and the sequences in it.

    Args:
        model: checked.
        memory: the pool.
        backend: kernels that fit the model's device and type.
        limits: of the model and the pool.
    """

    def __init__(
        self,
        model: RaggedModel,
        memory: KVMemory,
        backend: AttentionBackend,
        limits: Limits,
    ) -> None:
        self.limits = limits
        self.batch = BatchState(limits)
        self.sample_s = 0.0  # of the last step
        self._model = model
        self._memory = memory
        self._backend = backend
        self._row_sampling: RowSampling | None = None
        self._row_version = -1

    def reset(self) -> None:
        """Forget all sequences; the blocks' contents mean nothing from here on."""
        self.batch.reset()
        self._row_version = -1

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan; the caller sees to the order.

        Raises:
            PlanRefused: the plan does not fit the sequences here; only ``reset`` helps.
        """
        began = time.perf_counter()
        self.batch.apply(plan)
        rows = self.batch.rows(plan)
        self._move_blocks(plan)
        if rows.num_tokens == 0:
            return self._empty_result(plan, began)
        model_began = time.perf_counter()
        logits = self._compute(rows)
        sample_began = time.perf_counter()
        tokens, logprobs = self._sample(plan.step, rows, logits.sampled)
        candidates = self._rank(plan.step, rows, logits.beams) if rows.beams else ()
        ended_rows, ended_flags = self.batch.complete(rows, tokens)
        ended = time.perf_counter()
        self.sample_s = ended - sample_began
        return StepResult(
            step=plan.step,
            handles=self.batch.handle[rows.sampled],
            tokens=tokens.astype(np.int32),
            ended_rows=ended_rows.astype(np.int32),
            ended_flags=ended_flags,
            beams=candidates,
            logprobs=logprobs,
            prompt_logprobs=logits.scored,
            admitted_handles=_packed(new.handle for new in plan.admissions),
            admitted_computed=_packed(new.num_computed for new in plan.admissions),
            num_batched_tokens=rows.num_tokens,
            model_us=int((sample_began - model_began) * 1e6),
            step_us=int((ended - began) * 1e6),
        )

    def _move_blocks(self, plan: StepPlan) -> None:
        """All that blocks get from elsewhere: swaps, then copy-on-write.

        Before anything is computed: what goes must be kept, and originals and copies part.
        """
        if len(plan.swap_out_device):
            self._memory.swap_out(plan.swap_out_device, plan.swap_out_host)
        if len(plan.swap_in_device):
            self._memory.swap_in(plan.swap_in_host, plan.swap_in_device)
        if not len(plan.copy_sources):
            return
        device = self._model.device
        sources = torch.from_numpy(plan.copy_sources.astype(np.int64)).to(device)
        targets = torch.from_numpy(plan.copy_targets.astype(np.int64)).to(device)
        for cache in self._memory.layers.values():
            self._backend.copy_blocks(cache, sources, targets)

    def _compute(self, rows: Rows) -> "_Logits":
        """The forward pass."""
        device = self._model.device
        step = PagedStep(self._backend, self._memory.layers, self._ragged(rows))
        token_ids = torch.from_numpy(rows.token_ids).to(device)
        positions = torch.from_numpy(rows.positions).to(device)
        wanted, num_scored = _wanted_rows(rows)
        index = None if wanted is None else torch.from_numpy(wanted).to(device)
        logits = self._model.forward(token_ids, positions, step, index)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or the sampling would seem to take all the time
        scored, first = [], 0
        for chunk in rows.chunks if num_scored else ():
            if chunk.num_scored:
                last = first + chunk.num_scored
                scored.append(prompt_logprobs(logits[first:last], chunk))
                first = last
        last = len(logits) - sum(len(group.rows) for group in rows.beams)
        sampled = logits[first:last]
        if rows.forks is not None:
            sampled = sampled[torch.from_numpy(rows.forks.logit_rows).to(device)]
        return _Logits(sampled, logits[last:], tuple(scored))

    def _ragged(self, rows: Rows) -> RaggedBatch:
        device = self._model.device
        context_lens = self.batch.num_computed[rows.slots] + (
            1 if rows.sizes is None else rows.sizes
        )
        max_context_len = int(context_lens.max())
        num_blocks = -(-max_context_len // self.limits.kv.block_size)
        starts = np.zeros(len(rows.slots) + 1, np.int32)
        if rows.sizes is None:
            starts[:] = np.arange(len(starts))
        else:
            np.cumsum(rows.sizes, out=starts[1:])
        return RaggedBatch(
            slot_mapping=torch.from_numpy(rows.slot_mapping).to(device),
            block_tables=torch.from_numpy(self.batch.tables(rows.slots, num_blocks)).to(device),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)).to(device),
            query_starts=torch.from_numpy(starts).to(device),
            max_query_len=1 if rows.sizes is None else int(rows.sizes.max()),
            max_context_len=max_context_len,
        )

    def _sample(
        self,
        step: int,
        rows: Rows,
        logits: torch.Tensor,  # [R, V]
    ) -> tuple[Indices, tuple[TokenLogprobs, ...]]:
        """The next token [R] of each row that samples, and log-probabilities for those who ask."""
        batch, slots = self.batch, rows.sampled
        if not len(slots):
            return np.empty(0, np.int64), ()
        sampling = self._sampling_of(rows)
        asking = np.flatnonzero(batch.wants_logprobs[slots])
        raw = logits[torch.from_numpy(asking).to(logits.device)] if len(asking) else None
        if sampling.has_minimum:
            ban_ends(logits, batch, slots)
        drawn = sample(logits, sampling, batch.num_tokens[slots])
        if len(drawn.broken):
            handles = batch.handle[slots[drawn.broken]].tolist()
            log.error("logits are not finite", step=step, handles=handles)
        if raw is None:
            return drawn.tokens, ()
        chosen = torch.from_numpy(drawn.tokens[asking]).to(raw.device)
        num_top = batch.num_logprobs[slots][asking].tolist()
        return drawn.tokens, tuple(token_logprobs(raw, chosen, asking.tolist(), num_top))

    def _rank(
        self,
        step: int,
        rows: Rows,
        logits: torch.Tensor,  # [B, V]
    ) -> tuple[BeamCandidates, ...]:
        """How the beams may go on."""
        candidates, broken = beam_candidates(logits, rows.beams, self.batch)
        if len(broken):
            handles = self.batch.handle[broken].tolist()
            log.error("logits are not finite", step=step, beams=handles)
        return candidates

    def _sampling_of(self, rows: Rows) -> RowSampling:
        """Parameters of the rows; those of the step before if nothing changed."""
        known = rows.only_decodes and self._row_version == rows.version
        if self._row_sampling is None or not known:
            self._row_sampling = RowSampling.of(self.batch, rows.sampled, self._model.device)
            self._row_version = rows.version if rows.only_decodes else -1
        return self._row_sampling

    def _empty_result(self, plan: StepPlan, began: float) -> StepResult:
        none = np.empty(0, np.int32)
        self.sample_s = 0.0
        return StepResult(
            step=plan.step,
            handles=none,
            tokens=none,
            ended_rows=none,
            ended_flags=none,
            beams=(),
            logprobs=(),
            prompt_logprobs=(),
            admitted_handles=_packed(new.handle for new in plan.admissions),
            admitted_computed=_packed(new.num_computed for new in plan.admissions),
            num_batched_tokens=0,
            model_us=0,
            step_us=int((time.perf_counter() - began) * 1e6),
        )


@dataclass(frozen=True, slots=True)
class _Logits:
    """What a forward pass says about the next tokens."""

    sampled: torch.Tensor  # [R, V] of the rows that sample
    beams: torch.Tensor  # [B, V] of all beams, group by group
    scored: tuple[PromptLogprobs, ...]


def _packed(numbers: Iterable[int]) -> IntArray:
    return np.array(list(numbers), np.int32)


def _wanted_rows(rows: Rows) -> tuple[Indices | None, int]:
    """Rows whose logits are needed (None: all), and how many of them score prompt tokens.

    Those come first, then the rows that sample, then the beams.
    """
    if rows.sizes is None:
        return None, 0
    starts = rows.sizes.cumsum() - rows.sizes
    first = len(rows.slots) - len(rows.chunks)
    scored = [
        np.arange(starts[index], starts[index] + chunk.num_scored)
        for index, chunk in enumerate(rows.chunks, first)
        if chunk.num_scored
    ]
    if not scored and not rows.beams:
        return rows.sample_rows, 0
    assert rows.sample_rows is not None, "there are chunks"
    beams = [group.rows for group in rows.beams]
    return np.concatenate([*scored, rows.sample_rows, *beams]), sum(map(len, scored))
