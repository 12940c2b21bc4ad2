"""The Triton kernels under models and plans, without a GPU."""

from pathlib import Path

import pytest

from tests.support.interpreted import assert_passes_interpreted, needs_interpreter

pytest.importorskip("triton")


@needs_interpreter
def test_models_and_plans_pass_in_the_interpreter() -> None:
    names = ("interpreted_steps.py", "interpreted_launches.py")
    assert_passes_interpreted(*(Path(__file__).parent / name for name in names))
