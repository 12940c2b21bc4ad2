"""Forward passes over a step's inputs."""

from typing import Protocol

import torch

from gpu_worker.kv.memory import KVMemory
from gpu_worker.model.attention import PagedStep
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.step.inputs import StepInputs
from kernels.interface import AttentionBackend, RowArgmax


class StepRunner(Protocol):
    """Runs a forward pass."""

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of the wanted rows, padding included; valid until the next step runs."""

    def argmax(self, inputs: StepInputs) -> RowArgmax | torch.Tensor:
        """The argmax token of every row; or logits, as ``run``, where that is not supported."""


class EagerRunner:
    """Calls the model directly, without CUDA graphs.

    Args:
        model: a model that passed the check at load.
        memory: of keys and values.
        backend: attention kernels for the model's device and type.
    """

    def __init__(self, model: RaggedModel, memory: KVMemory, backend: AttentionBackend) -> None:
        self._model = model
        self._memory = memory
        self._backend = backend

    def run(self, inputs: StepInputs) -> torch.Tensor:
        return self._model.forward(
            inputs.token_ids, inputs.positions, self._step(inputs), inputs.wanted
        )

    def argmax(self, inputs: StepInputs) -> RowArgmax | torch.Tensor:
        return self._model.argmax(inputs.token_ids, inputs.positions, self._step(inputs))

    def _step(self, inputs: StepInputs) -> PagedStep:
        return PagedStep(self._backend, self._memory.caches, inputs.batch)
