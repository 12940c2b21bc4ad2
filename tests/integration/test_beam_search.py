"""Beam searches find the beams that transformers' own generate finds, with their scores."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Submit
from shared.sampling import BeamParams, EarlyStopping
from tests.integration.configurations import Configuration, serve
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model
from tests.support.requests import submit

NUM_TOKENS = 14
LENGTHS = (1, 7, 8, 9, 16, 21, 40)
# Many tokens end a beam, so that some do.
ENDS = tuple(range(10, VOCAB_SIZE, 29))
SEARCHES = (
    BeamParams(2, 1.0, EarlyStopping.ESTIMATED),
    BeamParams(3, 0.0, EarlyStopping.NEVER),
    BeamParams(4, 2.0, EarlyStopping.NEVER),
    BeamParams(4, 1.0, EarlyStopping.AT_ONCE),
    BeamParams(5, -1.0, EarlyStopping.ESTIMATED),
    BeamParams(6, 0.5, EarlyStopping.ESTIMATED),
    BeamParams(1, 1.0, EarlyStopping.ESTIMATED),
)
_EARLY_STOPPING = {"true": True, "false": False, "never": "never"}

Hypotheses = list[tuple[list[int], float]]
_alone: dict[str, list[Hypotheses]] = {}


def prompt(index: int) -> list[int]:
    tokens: list[int] = (
        np.random.default_rng(index).integers(3, VOCAB_SIZE, LENGTHS[index]).tolist()
    )
    return tokens


def searched_alone(path: Path) -> list[Hypotheses]:
    """What transformers finds, search by search; computed once."""
    if path.name not in _alone:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        _alone[path.name] = [
            _generated(model, prompt(index), params) for index, params in enumerate(SEARCHES)
        ]
    return _alone[path.name]


def _generated(model: torch.nn.Module, tokens: list[int], params: BeamParams) -> Hypotheses:
    with torch.inference_mode():
        if params.width == 1:  # which generate does not call a beam search
            return [(_greedy(model, tokens), 0.0)]
        found = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            num_beams=params.width,
            num_return_sequences=params.width,
            length_penalty=params.length_penalty,
            early_stopping=_EARLY_STOPPING[params.early_stopping],
            eos_token_id=[EOS_TOKEN_ID, *ENDS],
            output_scores=True,
            return_dict_in_generate=True,
        )
    sequences = found.sequences[:, len(tokens) :].tolist()
    return list(zip(map(_until_end, sequences), found.sequences_scores.tolist(), strict=True))


def _greedy(model: torch.nn.Module, tokens: list[int]) -> list[int]:
    found = model.generate(  # type: ignore[operator]
        input_ids=torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=[EOS_TOKEN_ID, *ENDS],
    )
    return _until_end(found[0, len(tokens) :].tolist())


def _until_end(tokens: list[int]) -> list[int]:
    ends = (at for at, token in enumerate(tokens) if token in (EOS_TOKEN_ID, *ENDS))
    return tokens[: next(ends, len(tokens)) + 1]


def search(index: int) -> Submit:
    params = SEARCHES[index]
    return submit(
        f"beams{index}",
        prompt(index),
        num_choices=params.width,
        max_tokens=NUM_TOKENS,
        stop_token_ids=ENDS,
        beams=params,
    )


def others() -> list[Submit]:
    """Greedy, drawn, and several choices of one prompt."""
    return [
        submit("greedy", prompt(3), max_tokens=20),
        submit("drawn", prompt(5), max_tokens=20, temperature=0.8, seed=5),
        submit("three", prompt(4), num_choices=3, max_tokens=20, temperature=0.9, seed=6),
    ]


CONFIGURATIONS = {
    "roomy": Configuration(),
    "chunks of few tokens": Configuration(max_num_batched_tokens=12),
    "one plan at a time": Configuration(max_plans_in_flight=1),
    "recomputed": Configuration(block_size=4, pool_tokens=190),
    "recomputed without a prefix cache": Configuration(8, 260, prefix_caching=False),
    "swapped": Configuration(4, 190, preemption="swap", host_tokens=2_000),
    "blocks of one token": Configuration(block_size=1, pool_tokens=170),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
async def test_beams_beside_all_other_ways_to_decode(
    name: str, llama: Path, redis_bus: RedisBus
) -> None:
    expected = searched_alone(llama)
    plain = await serve(redis_bus, llama, Configuration(), *([request] for request in others()))
    searches = [search(index) for index in range(len(SEARCHES))]
    mixed = [*others(), *searches]
    served = await serve(redis_bus, llama, CONFIGURATIONS[name], mixed)
    assert served.outputs()[:3] == plain.outputs()
    for answer, hypotheses, params in zip(served.answers[3:], expected, SEARCHES, strict=True):
        assert list(answer.outputs.values()) == [tokens for tokens, _ in hypotheses]
        if params.width > 1:
            assert answer.scores == pytest.approx([score for _, score in hypotheses], rel=1e-4)
    if name in ("recomputed", "recomputed without a prefix cache", "blocks of one token"):
        assert served.num_recomputed > 0, "the pool was meant to be too small"
    if name == "swapped":
        assert served.num_swapped > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("kind", ["opt", "gpt2", "gemma2", "gpt_neox"])
async def test_beams_of_other_families(kind: str, tmp_path: Path, redis_bus: RedisBus) -> None:
    path = tiny_model(kind, tmp_path / kind)
    expected = searched_alone(path)
    searches = [search(index) for index in range(len(SEARCHES))]
    served = await serve(redis_bus, path, Configuration(block_size=8), searches)
    for answer, hypotheses, params in zip(served.answers, expected, SEARCHES, strict=True):
        assert list(answer.outputs.values()) == [tokens for tokens, _ in hypotheses]
        if params.width > 1:
            assert answer.scores == pytest.approx([score for _, score in hypotheses], rel=1e-4)
