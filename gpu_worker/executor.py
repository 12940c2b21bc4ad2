"""Executes step plans on one model: plan in, result out, no bus."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.admissible import Limits
from gpu_worker.attention import PagedStep
from gpu_worker.batch import BatchState
from gpu_worker.candidates import beam_candidates
from gpu_worker.foresight import expect
from gpu_worker.logprobs import prompt_logprobs, token_logprobs
from gpu_worker.memory import KVMemory
from gpu_worker.model import RaggedModel
from gpu_worker.placement import Placement
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

# Nobody waits that long unless the step fails.
_PLACING_S = 1.0

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
        self.memory = memory
        self.sample_s = 0.0  # of the last step
        self._model = model
        self._backend = backend
        self._row_sampling: RowSampling | None = None
        self._row_version = -1
        # Who is where changes only under its lock, so that another thread can look ahead.
        self._placing = threading.Condition()
        self._step = 0  # whose sequences are in their places; 0: none's

    @property
    def device(self) -> torch.device:
        """Where the model and the pool are."""
        return self._model.device

    def reset(self) -> None:
        """Forget all sequences; the blocks' contents mean nothing from here on."""
        with self._placing:
            self._step = 0
            self.batch.reset()
            self.memory.keep(self.batch.taken)
        self._row_version = -1

    def foresee(self, plan: StepPlan) -> None:
        """Let memory prepare for the next plan while this one is carried out, on another thread.

        If the step before has only just begun, wait until its sequences are in their places. A
        plan that is not the next one, or does not fit, changes nothing.
        """
        with self._placing:
            if self._step == plan.step - 2:
                self._placing.wait(_PLACING_S)
            if self._step != plan.step - 1:
                return
            expected = expect(plan, self.batch)
        if expected is not None:
            self.memory.prepare(expected)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan; the caller sees to the order.

        Raises:
            PlanRefused: the plan does not fit the sequences here; only ``reset`` helps.
        """
        began = time.perf_counter()
        rows, batch = self._place(plan)
        if batch is None:
            return self._empty_result(plan, began)
        model_began = time.perf_counter()
        logits = self._compute(rows, batch)
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

    def _place(self, plan: StepPlan) -> tuple[Rows, RaggedBatch | None]:
        """What the plan computes, and where that lies; None if there is nothing to compute."""
        with self._placing:
            self._step = 0
            self.batch.apply(plan)
            self.memory.keep(self.batch.taken)
            rows = self.batch.rows(plan)
            self._move_blocks(plan)
            batch = self._ragged(rows) if rows.num_tokens else None
            self._step = plan.step
            self._placing.notify_all()
        return rows, batch

    def _move_blocks(self, plan: StepPlan) -> None:
        """All that blocks get from elsewhere: swaps, then copy-on-write.

        Before anything is computed: what goes must be kept, and originals and copies part.
        """
        if len(plan.swap_out_device):
            self.memory.swap_out(plan.swap_out_device, plan.swap_out_host)
        if len(plan.swap_in_device):
            self.memory.swap_in(plan.swap_in_host, plan.swap_in_device)
        if len(plan.copy_sources):
            self.memory.copy(plan.copy_sources, plan.copy_targets)

    def _compute(self, rows: Rows, batch: RaggedBatch) -> "_Logits":
        """The forward pass."""
        device = self._model.device
        step = PagedStep(self._backend, self.memory.caches, batch)
        token_ids = torch.from_numpy(rows.token_ids).to(device)
        positions = torch.from_numpy(rows.positions).to(device)
        wanted, num_scored = _wanted_rows(rows)
        index = None if wanted is None else torch.from_numpy(wanted).to(device)
        logits = self._model.forward(token_ids, positions, step, index)
        self.memory.attended()
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
        placement = Placement.of(self.batch, rows, self.limits.kv.block_size)
        return self.memory.translate(placement).ragged(self._model.device)

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
