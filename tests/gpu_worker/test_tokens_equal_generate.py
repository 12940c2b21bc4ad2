"""Whatever batch, chunks and blocks are: greedy tokens are those of transformers' generate."""

from typing import Any

import pytest
import torch

from tests.gpu_worker.conftest import MakeWorker, ModelPath, prompt
from tests.gpu_worker.planner import Planner
from tests.support.models import SERVED
from tests.support.weights import reference_model

NEW_TOKENS = 24


def generate(model: Any, tokens: list[int], num_new: int = NEW_TOKENS) -> list[int]:
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: list[int] = out[0, len(tokens) :].tolist()
    return found


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("kind", SERVED)
def test_ragged_batches_of_prefills_and_decodes(
    kind: str, block_size: int, backend: str, model_path: ModelPath, make_worker: MakeWorker
) -> None:
    model = reference_model(model_path(kind))
    worker = make_worker(
        kind, block_size=block_size, num_blocks=1024 // block_size, attention_backend=backend
    )
    planner = Planner(worker.executor)
    first, second, third, fourth = prompt(50, 1), prompt(17, 2), prompt(64, 3), prompt(1, 4)
    planner.admit(1, first)
    planner.step(s1=15)
    planner.step(s1=1)  # up to the border of a block of 16
    planner.admit(2, second)
    planner.step(s1=17, s2=7)
    planner.step(s2=10)  # the second decodes from here on
    planner.step(s1=17)
    planner.admit(3, third)
    planner.admit(4, fourth)
    planner.step(s3=63, s4=1)
    planner.step(s3=1)
    for handle, tokens in ((1, first), (2, second), (3, third), (4, fourth)):
        found = planner.run(handle, NEW_TOKENS)[:NEW_TOKENS]
        assert found == generate(model, tokens), f"sequence {handle}"


def test_blocks_may_be_handed_on_in_the_plan_that_retires_their_owner(
    model_path: ModelPath, make_worker: MakeWorker
) -> None:
    model = reference_model(model_path("llama"))
    planner = Planner(make_worker("llama", block_size=8, num_blocks=9).executor)
    for handle in range(1, 5):
        tokens = prompt(30 + handle, handle)
        planner.admit(handle, tokens)
        planner.step(**{f"s{handle}": 30 + handle})
        assert planner.run(handle, 12) == generate(model, tokens, 12)
        planner.retire(handle)


def test_a_preempted_sequence_goes_on_where_it_was(
    model_path: ModelPath, make_worker: MakeWorker
) -> None:
    model = reference_model(model_path("qwen3"))
    planner = Planner(make_worker("qwen3", block_size=8).executor)
    tokens = prompt(20)
    planner.admit(1, tokens)
    planner.step(s1=20)
    output = list(planner.run(1, 10))
    planner.retire(1)
    planner.admit(1, tokens + output, num_prompt_tokens=20)
    planner.step(s1=13)
    planner.step(s1=17)
    assert output + planner.run(1, 10) == generate(model, tokens, 20)
