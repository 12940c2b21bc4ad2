"""The switches of the optional pieces of the CPU kernels."""

import importlib

import pytest

from benchmarks.micro.kernel_choices import PIECES


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_replaces_what_there_is(piece: str) -> None:
    for module, name, value in PIECES[piece]:
        assert getattr(importlib.import_module(module), name) is not value
