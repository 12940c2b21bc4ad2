"""Layers that are played instead of called one by one, where that computes the same (CPU)."""

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.batch.plan_checks import Limits
from gpu_worker.model.graph.captured_layers import RecordedLayers
from gpu_worker.model.graph.layer_capture import record_layers
from gpu_worker.model.graph.torch_capture import CannotRecord
from gpu_worker.model.ragged_model import LayerShape, RaggedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.warm_up_plans import decode_plan, prefill_plan
from gpu_worker.step.executor import Executor
from gpu_worker.step.inputs import StepInputs
from gpu_worker.step.model_runner import StepRunner
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.instruction_set import detect
from kernels.cpu.sampling.pruned_argmax import RowArgmax
from kernels.interface import AttentionBackend
from shared.logs import EventLog
from shared.messages.plans import StepPlan

_NUM_SEQS = 2
_MOST_PROMPT = 19
_NUM_DECODES = 2

log = EventLog(__name__)


def play_layers(
    executor: Executor,
    model: RaggedModel,
    shapes: Sequence[LayerShape],
    backend: AttentionBackend,
    settings: WorkerSettings,
) -> None:
    """Play the layers from now on, if they can be recorded; else they stay as they are.

    The executor has no sequences; the pools' contents mean nothing.
    """
    instructions = detect()
    if settings.layer_kernels == "off" or instructions is None:
        return
    plans = trial(executor.limits)
    if not plans:
        log.info("layers are called one by one", because="the pool has no room to try them out")
        return
    try:
        layers = record_layers(
            model,
            [shape.module for shape in shapes],
            CpuLayers(instructions),
            backend,
            executor.memory.caches,
            settings.max_num_batched_tokens,
            executor.limits.max_model_len,
        )
    except CannotRecord as error:
        log.info("layers are called one by one", because=error)
        return
    if play_as_called(executor, layers, plans):
        return
    if model.short_cut is not None:
        log.warning("the model's own code runs around its layers: without, they compute otherwise")
        model.short_cut = None
    if not play_as_called(executor, layers, plans):
        log.warning("layers are called one by one: recorded they compute something else")
        layers.recorded = None


def play_as_called(executor: Executor, layers: RecordedLayers, plans: Sequence[StepPlan]) -> bool:
    """Whether all steps have the same logits, bit for bit.

    The executor has no sequences, neither before nor after; the pools' contents mean nothing.
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


def trial(limits: Limits) -> list[StepPlan]:
    """Two prompts and some decodes, as far as the pool has room; nothing if it has none."""
    kv, longest = limits.kv, limits.max_model_len - _NUM_DECODES - 1
    num_seqs = min(_NUM_SEQS, kv.num_blocks)
    room = kv.num_blocks // num_seqs * kv.block_size
    length = min(_MOST_PROMPT, longest, room - _NUM_DECODES)
    if length < 1:
        return []
    # Of unequal lengths, so that rows and sequences are told apart.
    lengths = [max(1, length - 5 * index) for index in range(num_seqs)]
    prompts = [np.arange(n, dtype=np.int32) % limits.vocab_size for n in lengths]
    num_blocks = -(-(length + _NUM_DECODES) // kv.block_size)
    decodes = [decode_plan(step + 2) for step in range(_NUM_DECODES)]
    return [prefill_plan(prompts, num_blocks), *decodes]


class _Both:
    """Computes every step in all ways; each writes the same keys and values."""

    def __init__(self, runner: StepRunner, layers: RecordedLayers) -> None:
        self.same = True
        self._runner = runner
        self._layers = layers

    def run(self, inputs: StepInputs) -> torch.Tensor:
        played = self._runner.run(inputs).clone()
        with self._layers.one_by_one():
            called = self._runner.run(inputs)
        self.same &= torch.equal(played, called)
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
