"""Tiny models are faster on one thread, above all beside other processes."""

from pathlib import Path

import pytest
import torch

from tests.support.models import tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return tiny_model("llama", tmp_path_factory.mktemp("model"))
