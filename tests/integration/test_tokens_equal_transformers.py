"""Scheduler, logs and worker together give the very tokens that transformers gives alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.bus.redis_bus import RedisBus
from tests.support.engine import running_engine
from tests.support.models import SERVED, VOCAB_SIZE, tiny_model
from tests.support.requests import submit
from tests.support.weights import WEIGHTS, reference_model

NUM_REQUESTS = 32
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompts_around(block_size: int) -> list[list[int]]:
    """Lengths just below, at and just above block borders, and some far from them."""
    rng = np.random.default_rng(block_size)
    borders = [max(1, block_size * blocks + more) for blocks in (1, 2, 3) for more in (-1, 0, 1)]
    lengths = [*borders, 1, 2, 5, 37, 70]
    lengths = [lengths[index % len(lengths)] for index in range(NUM_REQUESTS)]
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


def generated_alone(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """What transformers' own generate makes of one prompt."""
    with torch.inference_mode():
        found = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            use_cache=True,
        )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("kind", "block_size", "kv_memory"),
    [(kind, block_size, "paged") for kind in SERVED for block_size in (8, 16, 64)]
    + [("llama", 8, "virtual"), ("gemma2", 16, "virtual")],
)
async def test_greedy_tokens_with_preemption(
    kind: str, block_size: int, kv_memory: str, models: Path, redis_bus: RedisBus
) -> None:
    path = tiny_model(kind, models / kind)
    prompts = prompts_around(block_size)
    alone = reference_model(path)
    expected = [generated_alone(alone, prompt) for prompt in prompts]
    longest = -(-(max(map(len, prompts)) + NUM_TOKENS) // block_size)
    worker = WorkerSettings(
        model=str(path),
        device="cpu",
        dtype="float32",
        num_threads=1,
        quantization=WEIGHTS,
        kv_memory=kv_memory,
        block_size=block_size,
        num_blocks=longest * 3,
    )
    scheduler = SchedulerSettings(
        max_num_sequences=NUM_REQUESTS, max_num_batched_tokens=48, watermark=0.0
    )
    submits = [
        submit(f"r{index}", prompt, max_tokens=NUM_TOKENS) for index, prompt in enumerate(prompts)
    ]
    async with running_engine(redis_bus, worker, scheduler) as engine:
        answers = await engine.generate(submits)
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.tokens == tokens
        stopped = len(tokens) < NUM_TOKENS or tokens[-1] == 2
        assert answer.finish_reason == ("stop" if stopped else "length")
    assert engine.num_preemptions() > 0, "the pool was meant to be too small"
