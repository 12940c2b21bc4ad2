"""The real model, the model in transformers, and the model served by real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.deploy.running import Running, ready_lines
from tests.real_model.alone import Alone
from tests.real_model.long_text import CONTEXT
from tests.support.real_model import real_model_or_skip

NAME = "smollm2"
BLOCK_SIZE = 16
# Room for the longest sequence and some short ones.
NUM_BLOCKS = CONTEXT // BLOCK_SIZE + 128
_READY_DEADLINE_S = 300.0


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    return real_model_or_skip()


@pytest.fixture(scope="session")
def alone(real_model: Path) -> Alone:
    """Transformers, in float32."""
    return Alone(real_model)


@pytest.fixture(scope="module")
def served(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """All services, in float32."""
    yield from _serve(real_model, tmp_path_factory.mktemp("real_model"), "float32")


@pytest.fixture(scope="module")
def served_in_bfloat16(
    real_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """All services, in bfloat16, the type of the weights."""
    yield from _serve(real_model, tmp_path_factory.mktemp("bfloat16"), "bfloat16")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served_by_two_workers(
    real_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Running, str]]:
    """All services, with a part of the model on each of two workers; their type."""
    folder, flags = tmp_path_factory.mktemp("two_workers"), ("--tensor-parallel-size", "2")
    for running in _serve(real_model, folder, request.param, *flags, num_blocks=128):
        yield running, request.param


@pytest.fixture(scope="module", params=["swap", "recompute"])
def served_in_a_small_pool(
    real_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Running, str]]:
    """All services, in float32, with blocks for a few short sequences; how they preempt."""
    flags = ("--preemption", request.param, "--max-model-len", "256")
    folder = tmp_path_factory.mktemp("small_pool")
    for running in _serve(real_model, folder, "float32", *flags, num_blocks=20):
        yield running, request.param


def _serve(
    real_model: Path, folder: Path, dtype: str, *flags: str, num_blocks: int = NUM_BLOCKS
) -> Iterator[Running]:
    running = Running(
        folder,
        *("--model", str(real_model), "--served-model-name", NAME),
        *("--dtype", dtype, "--block-size", str(BLOCK_SIZE), "--num-blocks", str(num_blocks)),
        *flags,
    )
    try:
        running.until(
            lambda: running.process.poll() is not None or bool(ready_lines(running.output())),
            _READY_DEADLINE_S,
            "ready",
        )
        assert running.process.poll() is None, running.story()
        yield running
    finally:
        running.close()


@pytest.fixture
def client(served: Running) -> Iterator[OpenAI]:
    """OpenAI's own client."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as made:
        yield made
