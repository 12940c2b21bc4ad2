"""Replays a model's layers instead of calling them, if that computes the same bits (CPU)."""

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.batch.plan_checks import Limits
from gpu_worker.model.graph.captured_layers import ReplayedLayers
from gpu_worker.model.graph.layer_capture import capture_layers
from gpu_worker.model.graph.torch_capture import CannotCapture
from gpu_worker.model.ragged_model import LayerShape, RaggedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.warm_up_plans import decode_plan, prefill_plan
from gpu_worker.step.executor import Executor
from gpu_worker.step.inputs import StepInputs
from gpu_worker.step.model_runner import StepRunner
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.instruction_set import detect
from kernels.interface import AttentionBackend, RowArgmax
from shared.logs import EventLog
from shared.messages.plans import StepPlan

_NUM_SEQS = 2
_MOST_PROMPT = 19
_NUM_DECODES = 2

log = EventLog(__name__)


def replay_layers(
    executor: Executor,
    model: RaggedModel,
    shapes: Sequence[LayerShape],
    backend: AttentionBackend,
    settings: WorkerSettings,
) -> None:
    """Make the model replay its layers, if they can be captured; else it is unchanged.

    The executor has no sequences; the contents of its pools are overwritten.
    """
    instructions = detect()
    if settings.layer_kernels == "off" or instructions is None:
        return
    plans = trial_plans(executor.limits)
    if not plans:
        log.info("layers are called one by one", because="the pool has no room to try them out")
        return
    try:
        layers = capture_layers(
            model,
            [shape.module for shape in shapes],
            CpuLayers(instructions),
            backend,
            executor.memory.caches,
            settings.max_num_batched_tokens,
            executor.limits.max_model_len,
        )
    except CannotCapture as error:
        log.info("layers are called one by one", because=error)
        return
    if replays_exactly(executor, layers, plans):
        return
    if model.direct_pass is not None:
        log.warning("the model's own code runs around its layers: a replay computes otherwise")
        model.direct_pass = None
    if not replays_exactly(executor, layers, plans):
        log.warning("layers are called one by one: a replay computes something else")
        layers.captured = None


def replays_exactly(executor: Executor, layers: ReplayedLayers, plans: Sequence[StepPlan]) -> bool:
    """Whether replays have the logits of layers that are called one by one, bit for bit.

    The executor has no sequences, neither before nor after; the contents of its pools are
    overwritten.
    """
    runner = executor.runner
    executor.runner = both = _Both(runner, layers)
    try:
        for plan in plans:
            executor.execute(plan)
    finally:
        executor.reset()
        executor.runner = runner
    return both.same


def trial_plans(limits: Limits) -> list[StepPlan]:
    """Plans of two prompts and some decodes, as far as the pool has blocks; none without blocks."""
    kv, longest = limits.kv, limits.max_model_len - _NUM_DECODES - 1
    num_seqs = min(_NUM_SEQS, kv.num_blocks)
    room = kv.num_blocks // num_seqs * kv.block_size
    length = min(_MOST_PROMPT, longest, room - _NUM_DECODES)
    if length < 1:
        return []
    # Lengths differ, so that rows that are taken for sequences show.
    lengths = [max(1, length - 5 * index) for index in range(num_seqs)]
    prompts = [np.arange(n, dtype=np.int32) % limits.vocab_size for n in lengths]
    num_blocks = -(-(length + _NUM_DECODES) // kv.block_size)
    decodes = [decode_plan(step + 2) for step in range(_NUM_DECODES)]
    return [prefill_plan(prompts, num_blocks), *decodes]


class _Both:
    """Runs every step with and without replay; both write the same keys and values."""

    def __init__(self, runner: StepRunner, layers: ReplayedLayers) -> None:
        self.same = True
        self._runner = runner
        self._layers = layers

    def run(self, inputs: StepInputs) -> torch.Tensor:
        replayed = self._runner.run(inputs).clone()
        with self._layers.one_by_one():
            called = self._runner.run(inputs)
        self.same &= torch.equal(replayed, called)
        return called

    def argmax(self, inputs: StepInputs) -> RowArgmax | torch.Tensor:
        found = self._runner.argmax(inputs)
        if isinstance(found, RowArgmax):
            tokens, values = found.tokens.copy(), found.values.copy()
            logits = self.run(inputs).float().numpy()
            self.same &= bool(np.array_equal(logits.argmax(1), tokens))
            self.same &= bool(np.array_equal(logits.max(1), values))
            return RowArgmax(tokens, values)
        return self.run(inputs)
