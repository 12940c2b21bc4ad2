"""What a beam search found, looked at before it is believed."""

import numpy as np
import pytest

from gateway.engine.beam_hypotheses import find_fault, token_logprobs
from shared.messages.outputs import BeamsEnded, Hypothesis
from tests.gateway.fake_engine import hypothesis


def test_each_token_has_the_difference_of_its_sums() -> None:
    found = token_logprobs(hypothesis([7, 8, 9], sums=[-0.25, -0.75, -2.75]))
    assert [item.row for item in found] == [0, 1, 2]
    assert [item.logprob for item in found] == [-0.25, -0.5, -2.0]
    assert [len(item.top_ids) for item in found] == [0, 0, 0]


def test_rounded_sums_never_make_a_token_more_than_certain() -> None:
    before = np.float32(-100.0)
    after = np.nextafter(before, np.float32(0))
    found = token_logprobs(hypothesis([7, 8], sums=[float(before), float(after)]))
    assert [item.logprob for item in found] == [-100.0, 0.0]


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ([hypothesis([7])], "it has 1 hypotheses, not 2"),
        ([hypothesis([7])] * 3, "it has 3 hypotheses, not 2"),
        ([hypothesis([7]), hypothesis([])], "hypothesis 1 has no tokens"),
        ([hypothesis([7], [-1.0, -2.0]), hypothesis([7])], "hypothesis 0 has 1 tokens and 2"),
        ([hypothesis([7]), hypothesis([7], [float("nan")])], "hypothesis 1 has a score"),
        ([hypothesis([7]), hypothesis([7], score=float("-inf"))], "hypothesis 1 has a score"),
        ([hypothesis([7]), hypothesis([7], reason="abort")], "hypothesis 1 ended with 'abort'"),
        ([hypothesis([7]), hypothesis([7], reason="")], "hypothesis 1 ended with ''"),
    ],
)
def test_hypotheses_that_are_no_answer_are_detected(found: list[Hypothesis], fault: str) -> None:
    assert str(find_fault(BeamsEnded("a", tuple(found), "0-0"), 2)).startswith(fault)


def test_as_many_good_hypotheses_as_choices_are_an_answer() -> None:
    found = (hypothesis([7], reason="stop"), hypothesis([8, 9]))
    assert find_fault(BeamsEnded("a", found, "0-0"), 2) is None
