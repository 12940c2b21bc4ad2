"""Consecutive tokens, and blocks that are whole pages."""

import pytest
import torch
from torch import nn

from gpu_worker.kv.token_layout import fit_tokens
from gpu_worker.model.ragged_model import LayerShape
from kernels.interface import AttentionParams
from shared.errors import SettingsError

KIB = 1024


def shapes(
    num_layers: int, num_kv_heads: int, head_dim: int, *dtypes: torch.dtype
) -> list[LayerShape]:
    params = AttentionParams(1.0)
    return [
        LayerShape(nn.Identity(), num_kv_heads, head_dim, dtypes[index % len(dtypes)], params)
        for index in range(num_layers)
    ]


@pytest.mark.parametrize(
    ("model", "page_bytes", "block_size", "token_bytes"),
    [
        ((6, 2, 64), 4 * KIB, 16, 3 * KIB),  # the demo model: 12 pages
        ((32, 8, 128), 2048 * KIB, 16, 128 * KIB),  # Llama 8B on a GPU: one page
        ((32, 8, 128), 2048 * KIB, 64, 128 * KIB),
        ((28, 8, 128), 2048 * KIB, 16, 128 * KIB),  # 112 KiB padded
        ((28, 8, 128), 2048 * KIB, 128, 112 * KIB),
    ],
)
def test_blocks_are_whole_pages_with_little_or_no_padding(
    model: tuple[int, int, int], page_bytes: int, block_size: int, token_bytes: int
) -> None:
    layout = fit_tokens(shapes(*model, torch.bfloat16), block_size, page_bytes)
    assert layout.token_bytes == token_bytes
    assert layout.block_bytes == block_size * token_bytes
    assert layout.block_bytes % page_bytes == 0


def test_what_would_waste_much_is_refused_with_the_numbers_and_what_fits() -> None:
    demo = shapes(6, 2, 64, torch.bfloat16)
    wanted = r"--block-size=1: .* 4096 bytes, and 1 tokens of 3072 bytes are 3072; --block-size 4 "
    with pytest.raises(SettingsError, match=wanted):
        fit_tokens(demo, 1, 4 * KIB)
    with pytest.raises(SettingsError, match="no block size fits this model: use --kv-memory paged"):
        fit_tokens(demo, 16, 2048 * KIB)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,), (torch.float32, torch.bfloat16), (torch.int8,)]
)
def test_every_element_has_a_byte_of_its_own(dtypes: tuple[torch.dtype, ...]) -> None:
    layers = shapes(3, 2, 16, *dtypes)
    layout = fit_tokens(layers, 8, 1 * KIB)
    memory = torch.zeros(4 * layout.block_bytes, dtype=torch.uint8)
    views = layout.views(memory, 8)
    ranges = layout.views(memory, 16)  # the same bytes in pieces of two blocks
    number = 0
    for token in range(32):
        for shape in layers:
            for pool in views[shape.module].tensors:
                number += 1
                assert pool[token // 8, :, token % 8].eq(0).all(), "another token's bytes"
                pool[token // 8, :, token % 8] = number % 100 + 1
    number = 0
    for token in range(32):
        for shape in layers:
            for pool in ranges[shape.module].tensors:
                number += 1
                assert pool[token // 16, :, token % 16].eq(number % 100 + 1).all()
