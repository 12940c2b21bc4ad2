"""What the worker of the random walks makes of beams."""

import numpy as np
import pytest

from shared.codec import FloatArray, IntArray
from shared.messages.outputs import StepResult
from shared.messages.plans import Admission, BeamStep, StepPlan
from shared.messages.requests import Submit
from shared.sampling import BeamParams, EarlyStopping
from tests.support.requests import submit
from tests.support.walks.clients import Choice, Client
from tests.support.walks.worker import WalkWorker

NONE: IntArray = np.empty(0, np.int32)
BLOCK_SIZE = 4


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def plan(step: int, beam: BeamStep, **changes: object) -> StepPlan:
    names = (name for name in StepPlan.__slots__ if name != "idle_turns")
    values: dict[str, object] = dict.fromkeys(names, NONE)
    values |= {"step": step, "now_ms": 0, "admissions": (), "beams": (beam,)}
    values |= dict.fromkeys(("requests_cursor", "outputs_cursor", "outputs_min_id"), "0-0")
    return StepPlan(**{**values, **changes})  # type: ignore[arg-type]


def beam_step(
    handles: IntArray, scores: FloatArray, parents: IntArray = NONE, tokens: IntArray = NONE
) -> BeamStep:
    return BeamStep(1, handles, scores, parents, tokens)


def client_with_beams() -> Client:
    beams = BeamParams(2, 1.0, EarlyStopping.NEVER)
    asked: Submit = submit(prompt=[1, 2, 3], max_tokens=8, num_choices=2, beams=beams, seed=1)
    return Client(1, asked, None, 10_007, 8, [Choice(), Choice()])


def prefilled(client: Client) -> tuple[WalkWorker, StepResult]:
    """A worker that has computed the prompt as the first beam."""
    worker = WalkWorker([client], {}, 8, BLOCK_SIZE, 16, 96)
    new = Admission(1, 0, client.submit.prompt, 3, 0, ints(5), client.submit.sampling)
    first = plan(
        1,
        beam_step(ints(1), np.zeros(1, np.float32)),
        admissions=(new,),
        chunk_handles=ints(1),
        chunk_tokens=ints(3),
    )
    return worker, worker.execute(first, {1: [5]})


def test_beams_do_not_sample_but_have_candidates_best_first() -> None:
    client = client_with_beams()
    _, result = prefilled(client)
    [found] = result.beams
    assert len(result.handles) == 0
    assert len(found.tokens) == 2 * 2
    assert (np.diff(found.scores) <= 0).all()
    assert client.search is not None
    client.search.advance(found)


def test_a_new_beam_equals_its_parent_and_then_grows() -> None:
    client = client_with_beams()
    assert client.search is not None
    worker, result = prefilled(client)
    [found] = result.beams
    client.search.advance(found)
    branched = plan(
        2,
        beam_step(ints(1, 2), found.scores[:2], ints(1, 1), found.tokens[:2]),
        copy_sources=ints(5),
        copy_targets=ints(6),
        replaced_handles=ints(2),
        replaced_columns=ints(0),
        chunk_handles=ints(1, 2),
        chunk_tokens=ints(1, 1),
    )
    [found] = worker.execute(branched, {1: [5], 2: [6]}).beams
    for handle in (1, 2):
        assert worker.residents[handle].num_computed == 4
    client.search.advance(found)


def test_two_beams_that_write_the_same_block_are_detected() -> None:
    client = client_with_beams()
    worker, result = prefilled(client)
    [found] = result.beams
    branched = plan(
        2,
        beam_step(ints(1, 2), found.scores[:2], ints(1, 1), found.tokens[:2]),
        chunk_handles=ints(1, 2),
        chunk_tokens=ints(1, 1),
    )
    with pytest.raises(AssertionError, match="reads something else at 3 of 4"):
        worker.execute(branched, {1: [5], 2: [5]})
