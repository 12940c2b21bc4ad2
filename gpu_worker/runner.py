"""Forward passes over a step's inputs."""

from typing import Protocol

import torch

from gpu_worker.attention import PagedStep
from gpu_worker.memory import KVMemory
from gpu_worker.model import RaggedModel
from gpu_worker.step_inputs import StepInputs
from kernels.interface import AttentionBackend


class StepRunner(Protocol):
    """Computes logits."""

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of the wanted rows, padding included, until the next step runs."""


class EagerRunner:
    """Calls the model.

    Args:
        model: checked.
        memory: where keys and values lie.
        backend: kernels that fit the model's device and type.
    """

    def __init__(self, model: RaggedModel, memory: KVMemory, backend: AttentionBackend) -> None:
        self._model = model
        self._memory = memory
        self._backend = backend

    def run(self, inputs: StepInputs) -> torch.Tensor:
        step = PagedStep(self._backend, self._memory.caches, inputs.batch)
        return self._model.forward(inputs.token_ids, inputs.positions, step, inputs.wanted)
