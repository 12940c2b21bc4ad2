"""Executes step plans on one model: plan in, result out, no bus.

``begin`` queues all work of a step; ``finish`` takes its tokens. On a GPU the next step may begin
before the one before is finished: it reads its input tokens on the device. If a sequence turns out
to have ended in the step before, the next one has computed it once too often. That does no harm,
because its blocks are still its own, and its row is left out of the result.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLTokenizer

from gpu_worker.batch.batch import BatchState
from gpu_worker.batch.plan_checks import Limits
from gpu_worker.batch.rows import Indices, Rows
from gpu_worker.grammar.grammars import Grammars
from gpu_worker.kv.memory import KVMemory
from gpu_worker.kv.premap_demand import premap_demand
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.sampling.beam_candidates import beam_candidates
from gpu_worker.sampling.logprobs import prompt_logprobs, token_logprobs
from gpu_worker.sampling.penalties import Penalties
from gpu_worker.sampling.sampler import (
    ChosenTokens,
    RowSampling,
    ban_ends,
    below_min_tokens,
    choose,
    gumbel_keys,
)
from gpu_worker.step.begun_step import BegunStep
from gpu_worker.step.buckets import Buckets
from gpu_worker.step.cuda_graphs import GraphRunner
from gpu_worker.step.grammar_masks import StepMasks, begin_masks, failed_rows, take_tokens
from gpu_worker.step.input_buffers import StepBuffers, StepSize
from gpu_worker.step.inputs import InputWriter, StepInputs, first
from gpu_worker.step.last_tokens import LastTokens
from gpu_worker.step.model_runner import EagerRunner, StepRunner
from gpu_worker.step.outcome import Outcome, Outcomes
from gpu_worker.step.token_placement import Placement
from kernels.interface import AttentionBackend, RowArgmax
from shared.logs import EventLog
from shared.messages.endings import EndFlag
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import BeamCandidates, PromptLogprobs, StepResult
from shared.messages.plans import StepPlan

# Placing a step takes far less, unless the step fails.
_PLACING_TIMEOUT_S = 1.0
# Steps that may be begun and not finished.
_MOST_UNDER_WAY = 2
_NO_KEYS = np.empty((2, 0), np.int32)

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that buffers are allocated for; for a larger step they grow."""

    num_tokens: int = 512
    num_seqs: int = 256

    def size(self) -> StepSize:
        """Numbers of entries of its inputs."""
        num_tokens, num_seqs = self.num_tokens, self.num_seqs
        return StepSize(num_tokens, num_seqs, num_seqs, num_tokens, False)


class Executor:
    """Runs one model over one KV memory and keeps the batch of resident sequences.

    Args:
        model: a model that passed the check at load.
        memory: the KV pools.
        backend: attention kernels for the model's device and type.
        limits: of the model and the pools.
        largest: step that buffers are allocated for.
        buckets: sizes that steps are padded to; None: no padding.
        grammar_tokenizer: for structured output; None: there is none.
    """

    def __init__(
        self,
        model: RaggedModel,
        memory: KVMemory,
        backend: AttentionBackend,
        limits: Limits,
        largest: StepLimits | None = None,
        buckets: Buckets | None = None,
        grammar_tokenizer: LLTokenizer | None = None,
    ) -> None:
        largest = largest or StepLimits()
        self.limits = limits
        self.batch = BatchState(limits)
        self.memory = memory
        self.sample_s = 0.0  # of the last step
        self.runner: StepRunner = EagerRunner(model, memory, backend)
        self._model = model
        buffers = StepBuffers(model.device, largest.size(), limits.max_blocks)
        self._writer = InputWriter(buffers, buckets, limits.max_model_len)
        self._outcomes = Outcomes(model.device, largest.num_seqs)
        self._last_tokens = LastTokens(model.device)
        self._penalties = Penalties(limits.vocab_size, largest.num_seqs, model.device)
        self._grammars = Grammars(
            grammar_tokenizer, limits.vocab_size, limits.eos_token_ids, model.device
        )
        self._row_sampling: RowSampling | None = None
        self._row_version = -1
        self._under_way: deque[BegunStep] = deque()
        self._ended_s = 0.0  # when the last step ended
        # Guards the mapping from sequences to batch rows, which another thread premaps by.
        self._placing = threading.Condition()
        self._step = 0  # the step that was placed last; 0 while one is being placed

    @property
    def device(self) -> torch.device:
        """The device of the model and of the pool."""
        return self._model.device

    def reset(self) -> None:
        """Drop all sequences and the contents of all blocks."""
        with self._placing:
            self._step = 0
            self.batch.reset()
            self.memory.keep(self.batch.taken)
        self._penalties.reset()
        self._grammars.reset()
        self._row_version = -1
        self._under_way.clear()

    def premap(self, plan: StepPlan) -> None:
        """Map blocks for the next plan while a step computes; called on another thread.

        If the step before has not been placed yet, wait until it is. A plan that is not the next
        one, or does not fit the batch, changes nothing.
        """
        with self._placing:
            if self._step == plan.step - 2:
                self._placing.wait(_PLACING_TIMEOUT_S)
            if self._step != plan.step - 1:
                return
            demand = premap_demand(plan, self.batch)
        if demand is not None:
            self.memory.premap(demand)

    def execute(self, plan: StepPlan) -> StepResult:
        """Begin and finish one plan; plans must come in their order.

        Raises:
            PlanRefused: the plan does not fit the batch; the executor must be ``reset``.
        """
        begun = self.begin(plan)
        begun.wait()
        return self.finish(begun)

    def capture_graphs(self, buckets: Buckets) -> None:
        """Capture a CUDA graph for each size and pad steps to them; without graphs on failure."""
        num_seqs = max(bucket.num_seqs for bucket in buckets)
        runner = GraphRunner(self.runner, num_seqs, self.limits.max_blocks, self.device)
        try:
            runner.capture(self._writer, buckets)
        except RuntimeError as error:
            log.warning("CUDA graphs are off: the model cannot be captured", error=error)
            return
        self.runner, self._writer.buckets = runner, buckets

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> BegunStep:
        """Queue all work of a plan; one step before it may be unfinished.

        Raises:
            PlanRefused: the plan does not fit the batch; the executor must be ``reset``.
        """
        assert len(self._under_way) < _MOST_UNDER_WAY, plan.step
        began_s = time.perf_counter()
        rows, placement = self._place(plan)
        self._penalties.follow(plan)
        self._grammars.follow(plan)
        outcome = self._outcomes.next()
        if placement is None:
            begun = self._begin_nothing(plan, began_s, rows, outcome)
        else:
            begun = self._begin(plan, began_s, rows, placement, outcome)
        self._under_way.append(begun)
        return begun

    def finish(self, begun: BegunStep) -> StepResult:
        """Wait for the device; the result of ``begun``, which must be the earliest begun step."""
        assert self._under_way[0] is begun, begun.plan.step
        begun.wait()
        tokens, broken = begun.outcome.tokens()
        if len(broken):
            handles = begun.advanced.handles[broken].tolist()
            log.error("logits are not finite", step=begun.plan.step, handles=handles)
        take_tokens(self._grammars, begun)
        flags = self.batch.settle(begun.advanced, tokens, failed_rows(self._grammars, begun))
        self._under_way.popleft()
        ended = (flags != 0) & (flags != EndFlag.LENGTH)  # others end when they begin
        for later in self._under_way:
            later.ended_before += begun.advanced.handles[ended].tolist()
        times = begun.outcome.times()
        step_s = times.ended_s - max(begun.began_s, self._ended_s)
        self.sample_s, self._ended_s = times.sample_s, times.ended_s
        return begun.result(tokens, flags, times.model_s, step_s)

    def _begin(
        self,
        plan: StepPlan,
        began_s: float,
        rows: Rows,
        placement: Placement,
        outcome: Outcome,
    ) -> BegunStep:
        sampling = self._sampling_of(rows) if len(rows.sampled) else None
        keys = _NO_KEYS
        if sampling is not None:
            keys = gumbel_keys(sampling, self.batch.num_tokens[rows.sampled])
        wanted, num_scored = _wanted_rows(rows)
        only_samples = not num_scored and not rows.beams
        inputs = self._writer.write(rows, placement, wanted, keys, only_samples)
        num_wanted = rows.num_tokens if wanted is None else len(wanted)
        masks = begin_masks(self._grammars, self.batch, rows, self._under_way)
        outcome.model_begins()
        every_row_samples = rows.sizes is None and rows.only_decodes
        only_argmax = every_row_samples and sampling is not None and sampling.only_argmax
        found = self._compute(rows, inputs, only_argmax)
        outcome.model_ended()
        if isinstance(found, RowArgmax):
            chosen = ChosenTokens.of(found)
            self._last_tokens.write(inputs.sampled, chosen.tokens)
            outcome.sampled(chosen)
            advanced = self.batch.advance(rows)
            return BegunStep(plan, began_s, rows.num_tokens, advanced, outcome, (), (), ())
        logits = first(found, num_wanted)
        scored = _score(rows, logits[:num_scored]) if num_scored else ()
        last = num_wanted - sum(len(group.rows) for group in rows.beams)
        candidates = self._rank(plan.step, rows, logits[last:], masks) if rows.beams else ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling is None:
            outcome.sampled(None)
        else:
            chosen, logprobs = self._sample(
                rows, first(logits, last)[num_scored:], sampling, keys, inputs, masks
            )
            outcome.sampled(chosen)
        advanced = self.batch.advance(rows)
        begun = BegunStep(
            plan, began_s, rows.num_tokens, advanced, outcome, candidates, logprobs, scored
        )
        begun.grammar_rows = None if masks is None else masks.sampled
        return begun

    def _begin_nothing(
        self, plan: StepPlan, began_s: float, rows: Rows, outcome: Outcome
    ) -> BegunStep:
        """Begin a step without rows: only blocks and the batch change."""
        outcome.model_begins()
        outcome.model_ended()
        outcome.sampled(None)
        return BegunStep(plan, began_s, 0, self.batch.advance(rows), outcome, (), (), ())

    def _place(self, plan: StepPlan) -> tuple[Rows, Placement | None]:
        """Apply the plan to batch and memory: its rows and their placement (None: no rows)."""
        with self._placing:
            self._step = 0
            self.batch.apply(plan)
            self.memory.keep(self.batch.taken)
            rows = self.batch.rows(plan)
            self._move_blocks(plan)
            placement = None
            if rows.num_tokens:
                placement = Placement.of(self.batch, rows, self.limits.kv.block_size)
                placement = self.memory.translate(placement)
            self._step = plan.step
            self._placing.notify_all()
        return rows, placement

    def _move_blocks(self, plan: StepPlan) -> None:
        """Queue swaps out, swaps in and copy-on-write, in this order, before the forward pass."""
        if len(plan.swap_out_device):
            self.memory.swap_out(plan.swap_out_device, plan.swap_out_host)
        if len(plan.swap_in_device):
            self.memory.swap_in(plan.swap_in_host, plan.swap_in_device)
        if len(plan.copy_sources):
            self.memory.copy(plan.copy_sources, plan.copy_targets)

    def _compute(
        self, rows: Rows, inputs: StepInputs, only_argmax: bool
    ) -> RowArgmax | torch.Tensor:
        """The forward pass: logits [wanted rows and padding, V], or only the argmax tokens."""
        self._last_tokens.hold(len(self.batch.taken))
        if num_decoding := rows.num_decoding:
            self._last_tokens.read(inputs.decoding, first(inputs.token_ids, num_decoding))
        run = self.runner.argmax if only_argmax else self.runner.run
        found = run(inputs)
        self.memory.mark_queued()
        return found

    def _sample(
        self,
        rows: Rows,
        logits: torch.Tensor,  # [R - F, V]
        sampling: RowSampling,
        keys: npt.NDArray[np.int32],  # [2, N]
        inputs: StepInputs,
        masks: StepMasks | None,
    ) -> tuple[ChosenTokens, tuple[TokenLogprobs, ...]]:
        """The next token [R] of each row that samples, and log-probabilities where wanted."""
        batch, slots = self.batch, rows.sampled
        if rows.forks is not None:
            logits = logits[self._on_device(rows.forks.logit_rows)]
        logprob_rows = sampling.logprob_rows
        on_device = self._on_device(logprob_rows) if len(logprob_rows) else None
        raw = None if on_device is None else logits[on_device]
        if (penalized := sampling.penalized) is not None:
            logits = penalized.changed(logits)
        if sampling.has_min_tokens:
            ban_ends(logits, batch, slots)
        if masks is not None:
            masks.ban(logits)
        chosen = choose(logits, sampling, keys, inputs.keys)
        if penalized is not None:
            penalized.count(chosen.tokens)
        self._last_tokens.write(inputs.sampled, chosen.tokens)
        if raw is None:
            return chosen, ()
        num_top = batch.num_logprobs[slots][logprob_rows].tolist()
        found = token_logprobs(raw, chosen.tokens[on_device], logprob_rows.tolist(), num_top)
        return chosen, tuple(found)

    def _on_device(self, numbers: Indices) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)

    def _rank(
        self,
        step: int,
        rows: Rows,
        logits: torch.Tensor,  # [B, V]
        masks: StepMasks | None,
    ) -> tuple[BeamCandidates, ...]:
        """The candidates for the next tokens of each beam group."""
        allowed = None if masks is None else masks.allowed_of_beams(len(logits))
        candidates, broken = beam_candidates(logits, rows.beams, self.batch, allowed)
        if len(broken):
            handles = self.batch.handle[broken].tolist()
            log.error("logits are not finite", step=step, beams=handles)
        return candidates

    def _sampling_of(self, rows: Rows) -> RowSampling:
        """Sampling parameters of the rows, reused from the step before if nothing changed."""
        found = self._row_sampling
        known = rows.only_decodes and self._row_version == rows.version
        if known and found is not None and found.has_min_tokens:
            # The version does not change when the last sequence reaches its minimum.
            known = bool(below_min_tokens(self.batch, rows.sampled).any())
        if found is None or not known:
            found = RowSampling.of(self.batch, rows.sampled, self._penalties, self.device)
            self._row_sampling = found
            self._row_version = rows.version if rows.only_decodes else -1
        return found


def _score(rows: Rows, logits: torch.Tensor) -> tuple[PromptLogprobs, ...]:
    """Log-probabilities of prompt tokens, from the logits [n, V] of their rows."""
    scored, first = [], 0
    for chunk in rows.chunks:
        if chunk.num_scored:
            last = first + chunk.num_scored
            scored.append(prompt_logprobs(logits[first:last], chunk))
            first = last
    return tuple(scored)


def _wanted_rows(rows: Rows) -> tuple[Indices | None, int]:
    """Rows whose logits are needed (None: all), and how many of them score prompt tokens.

    The order is: rows that score prompt tokens, rows that sample, rows of beams.
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
