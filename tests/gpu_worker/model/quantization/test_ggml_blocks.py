"""Blocks of ggml's types mean what ggml's own package reads in them."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.model.quantization.ggml_blocks import BLOCK_TYPES
from tests.support.gguf_files import random_blocks

OUTPUTS, INPUTS = 5, 1024


def random_rows(kind: gguf.GGMLQuantizationType) -> Any:
    if kind.name.endswith("_K") or kind.name.startswith("IQ"):
        return random_blocks(kind, OUTPUTS, INPUTS)
    weights = np.random.default_rng(0).normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
    return gguf.quantize(weights, kind)


@pytest.mark.parametrize("type_id", BLOCK_TYPES)
def test_codes_scales_and_minimums_give_ggmls_values(type_id: int) -> None:
    ours, kind = BLOCK_TYPES[type_id], gguf.GGMLQuantizationType(type_id)
    assert (ours.name, ours.block_size, ours.block_bytes) == (
        kind.name,
        *gguf.GGML_QUANT_SIZES[kind],
    )
    rows = random_rows(kind)
    found = ours.quantized(torch.from_numpy(rows))
    assert found.shape == (OUTPUTS, INPUTS)
    least = -(2 ** (found.bits - 1))
    assert int(found.codes.min()) >= least
    assert int(found.codes.max()) < -least
    expected = torch.from_numpy(gguf.dequantize(rows, kind))
    assert torch.equal(found.dequantize(), expected)


def test_rows_that_have_no_whole_number_of_blocks_have_no_size() -> None:
    assert BLOCK_TYPES[8].row_bytes(64) == 68
    assert BLOCK_TYPES[8].row_bytes(65) is None
