"""Steps that want nothing but the likeliest tokens, found without computing all logits (CPU)."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from gpu_worker.model.fusion import cpu_fusion
from gpu_worker.model.fusion.cpu_layers import PackedLinear
from gpu_worker.model.graph import direct_pass, replay_check
from gpu_worker.model.graph.captured_layers import ReplayedLayers
from gpu_worker.model.graph.direct_pass import DirectPass
from gpu_worker.model.graph.replay_check import replays_exactly, trial_plans
from gpu_worker.startup.build import Worker
from gpu_worker.step.executor import Executor
from kernels.cpu.runtime.instruction_set import Dot, Instructions, detect
from kernels.cpu.sampling.pruned_argmax_entry_points import is_served
from kernels.interface import RowArgmax
from shared.sampling import TokenBias
from tests.gpu_worker.conftest import MakeWorker, poison, prompt
from tests.gpu_worker.planner import Planner, sampling

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")

EMULATED = Instructions("emulated", wide=True, dot=Dot.EMULATED)
# More than a step of few rows, whose inputs have finer codes, and a thread's share of others.
NUM_SEQS = 11


@pytest.fixture(scope="module")
def instructions() -> Instructions:
    """This CPU's, if the pruned argmax has kernels for them; else those that stand in for them."""
    found = detect()
    return found if found is not None and is_served(found) else EMULATED


@pytest.fixture(scope="module")
def llama(make_worker: MakeWorker, instructions: Instructions) -> Iterator[Worker]:
    """A tiny Llama in bfloat16, whose executor all tests here get."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (cpu_fusion, replay_check):
            patched.setattr(module, "detect", lambda: instructions)
        yield make_worker("llama", dtype="bfloat16", block_size=8, num_threads=2, num_blocks=128)


def direct(executor: Executor) -> DirectPass:
    found = executor._model.direct_pass
    assert isinstance(found, DirectPass)
    return found


def generate(executor: Executor, num_steps: int = 12) -> tuple[list[list[int]], int]:
    """What some sequences say, prompts of which come while others decode; and steps pruned."""
    executor.reset()
    before = direct(executor)._num_pruned
    planner = Planner(executor)
    for handle in range(1, NUM_SEQS + 1):
        tokens = prompt(3 + 4 * handle % 19, seed=handle)
        planner.admit(handle, tokens)
        planner.step(**{f"s{handle}": len(tokens)})
    for _ in range(num_steps):
        planner.step()
    outputs = [planner.known[handle].output for handle in range(1, NUM_SEQS + 1)]
    return outputs, direct(executor)._num_pruned - before


def test_tokens_are_those_of_all_logits(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned, num_pruned = generate(executor)
    assert num_pruned == 12  # all in which every sequence decodes
    monkeypatch.setattr(direct(executor), "_pruned", None)
    whole, num_pruned = generate(executor)
    assert num_pruned == 0
    assert pruned == whole
    assert len({token for output in whole for token in output}) > NUM_SEQS


@pytest.mark.parametrize(
    "asked",
    [
        sampling(temperature=1.0),
        sampling(num_logprobs=0),
        sampling(min_tokens=5),
        sampling(repetition_penalty=1.3),
        sampling(logit_bias=(TokenBias(7, 2.0),)),
    ],
    ids=["drawn", "log-probabilities", "minimum", "penalty", "bias"],
)
def test_steps_that_need_more_of_logits_than_their_argmax_are_not_pruned(
    executor: Executor, asked: object
) -> None:
    cut, planner = direct(executor), Planner(executor)
    planner.admit(1, prompt(5))
    planner.admit(2, prompt(9, seed=1), asked)  # type: ignore[arg-type]
    planner.step(s1=5, s2=9)
    before = cut._num_pruned
    planner.step()
    planner.step()
    assert cut._num_pruned == before
    planner.retire(2)
    planner.step()
    planner.step()
    assert cut._num_pruned == before + 2


def test_a_minimum_that_is_reached_is_forgotten(executor: Executor) -> None:
    cut, planner = direct(executor), Planner(executor)
    planner.admit(1, prompt(5), sampling(min_tokens=4))
    planner.step(s1=5)
    before = cut._num_pruned
    for _ in range(6):
        planner.step()
    assert cut._num_pruned == before + 3  # of the tokens behind the fourth


def test_a_step_in_which_sequences_fork_is_not_pruned(executor: Executor) -> None:
    cut, planner = direct(executor), Planner(executor)
    planner.admit(1, prompt(5))
    planner.admit(2, prompt(7))
    planner.fork(2, 3, 1)
    before = cut._num_pruned
    planner.step(s1=5, s2=7)
    assert cut._num_pruned == before
    planner.step()
    assert cut._num_pruned == before + 1
    assert planner.known[3].output == planner.known[2].output


def test_undecided_rows_are_left_to_the_output_layer_and_in_the_end_all_are(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = generate(executor)
    cut = direct(executor)
    pruned = cut._pruned
    assert pruned is not None
    found, steps = pruned.found, itertools.count()

    def undecided(num_rows: int) -> RowArgmax:
        if next(steps) % 3 == 0:
            return found(num_rows)
        right = found(num_rows)
        return replace(right, tokens=np.where(np.arange(num_rows) == num_rows - 1, -1, 0))

    monkeypatch.setattr(pruned, "found", undecided)
    monkeypatch.setattr(cut, "_pruned", pruned)
    monkeypatch.setattr(cut, "_num_pruned", 0)
    monkeypatch.setattr(cut, "_num_undecided", 0)
    monkeypatch.setattr(direct_pass, "_UNDECIDED", 10)
    tokens, num_pruned = generate(executor, num_steps=12)
    assert num_pruned == 12
    assert tokens == expected
    assert cut._pruned is pruned
    with caplog.at_level("INFO"):
        tokens, _ = generate(executor, num_steps=12)
    assert tokens == expected
    assert cut._pruned is None
    assert "output layers are computed whole" in caplog.text


def test_a_few_undecided_steps_among_many_change_nothing(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = direct(executor)
    monkeypatch.setattr(direct_pass, "_UNDECIDED", 2)
    monkeypatch.setattr(cut, "_num_pruned", 100)
    monkeypatch.setattr(cut, "_num_undecided", 0)
    cut._count_undecided()
    cut._count_undecided()
    assert cut._pruned is not None
    assert cut._num_undecided == cut._num_pruned == 0


def test_other_tokens_than_those_of_the_logits_are_detected_at_start(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (captured,) = (
        each for each in executor._model.model.modules() if isinstance(each, ReplayedLayers)
    )
    plans, pruned = trial_plans(executor.limits), direct(executor)._pruned
    assert pruned is not None
    assert replays_exactly(executor, captured, plans)
    found = pruned.found
    for wrong in (
        lambda n: replace(found(n), tokens=found(n).tokens ^ 1),
        lambda n: replace(found(n), values=found(n).values + 1),
    ):
        monkeypatch.setattr(pruned, "found", wrong)
        assert not replays_exactly(executor, captured, plans)


def test_logits_that_are_no_numbers_are_reported(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cut, planner = direct(executor), Planner(executor)
    planner.admit(1, prompt(5))
    planner.step(s1=5)
    monkeypatch.setattr(cut, "_num_undecided", 0)
    poison(executor)
    planner.step()
    assert "logits are not finite" in caplog.text
    assert cut._num_undecided == 1


def test_codes_count_as_weights(llama: Worker) -> None:
    model = llama.executor._model
    pruned = direct(llama.executor)._pruned
    assert pruned is not None
    assert pruned.nbytes > model.vocab_size * model.config.hidden_size
    assert isinstance(head := direct(llama.executor)._head, PackedLinear)
    assert model.packed_bytes > pruned.nbytes + head.layers.weight.nbytes
    assert llama.weight_bytes == model.weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_bfloat16_is_pruned(
    dtype: str,
    make_worker: MakeWorker,
    instructions: Instructions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (cpu_fusion, replay_check):
        monkeypatch.setattr(module, "detect", lambda: instructions)
    found = direct(make_worker("llama", dtype=dtype).executor)._pruned
    assert (found is not None) == (dtype == "bfloat16")
