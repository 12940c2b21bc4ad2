"""Workers on tiny models, loaded once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from gpu_worker.step.executor import Executor
from kernels.interface import LayerCache
from tests.support.models import tiny_model
from tests.support.weights import WEIGHTS

transformers.logging.disable_progress_bar()

ModelPath = Callable[[str], Path]
MakeWorker = Callable[..., Worker]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> ModelPath:
    """Path of a tiny model by its kind, saved on first use."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def path(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_model(kind, folder)
        return made[kind]

    return path


@pytest.fixture(scope="session")
def make_worker(model_path: ModelPath) -> MakeWorker:
    """A worker by model kind and settings; its pool is poisoned."""

    def make(kind: str, **settings: Any) -> Worker:
        values = {
            "model": str(model_path(kind)),
            "dtype": "float32",
            "device": "cpu",
            "num_blocks": 64,
            "num_threads": 1,  # more threads cost more than they gain with tiny models
            "quantization": WEIGHTS,
            **settings,
        }
        worker = build_worker(WorkerSettings(**values))
        poison(worker.executor)
        return worker

    return make


@pytest.fixture(scope="module")
def llama(make_worker: MakeWorker) -> Worker:
    """A worker with a tiny Llama and blocks of eight tokens."""
    return make_worker("llama", block_size=8)


@pytest.fixture
def executor(llama: Worker) -> Executor:
    """The tiny Llama's executor without sequences, its pool full of NaN."""
    llama.executor.reset()
    poison(llama.executor)
    return llama.executor


def poison(executor: Executor) -> None:
    """Fill the pool with NaN, so that a read of unwritten slots shows."""
    cache: LayerCache
    for cache in executor.memory.layers.values():
        for each in cache.tensors:
            each.fill_(torch.nan if each.is_floating_point() else 127)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens without special ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, 4096, (length,), generator=generator).tolist()
    return tokens
