"""The demo model's executor, which takes seconds to make, and its tokenizer."""

import pytest
from llguidance import LLTokenizer

from deploy.settings import REPOSITORY
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from gpu_worker.step.executor import Executor

DEMO = REPOSITORY / "models" / "demo"


@pytest.fixture(scope="session")
def executor() -> Executor:
    settings = WorkerSettings(
        model=str(DEMO), device="cpu", dtype="float32", block_size=4, num_blocks=4_000
    )
    return build_worker(settings).executor


@pytest.fixture(scope="session")
def grammar_tokenizer() -> LLTokenizer:
    return LLTokenizer((DEMO / "tokenizer.json").read_text())
