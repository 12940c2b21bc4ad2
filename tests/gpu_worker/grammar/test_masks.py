"""Masks as a device has them: the torch code of GPUs, on CPU tensors and on a GPU, if any."""

import numpy as np
import pytest
import torch

from gpu_worker.grammar.grammars import Grammars, unpacked
from gpu_worker.sampling import cpu_bans
from gpu_worker.step.grammar_masks import ban_rows

HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU"))]


def masks(num_rows: int, vocab_size: int) -> np.ndarray:
    """Random ones; bits behind the vocabulary are set, which must not matter."""
    words = np.random.default_rng(vocab_size).integers(0, 2**32, (num_rows, -(-vocab_size // 32)))
    found = words.astype(np.uint32)
    found[0], found[1] = 0, 0xFFFFFFFF
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1_000, 4_096, 151_936])
def test_masks_are_unpacked_on_a_device_as_by_numpy(vocab_size: int, device: str) -> None:
    packed = masks(3, vocab_size)
    by_numpy = Grammars(None, vocab_size, (), torch.device("cpu")).unpack(packed)
    on_device = torch.from_numpy(packed.view(np.int32)).to(device)
    assert torch.equal(unpacked(on_device, vocab_size).cpu(), by_numpy)
    for row, words in zip(by_numpy.tolist(), packed.tolist(), strict=True):
        assert row == [bool(words[token // 32] >> token % 32 & 1) for token in range(vocab_size)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_a_device_are_banned_in_the_rows_with_a_mask_alone(
    dtype: torch.dtype, device: str
) -> None:
    logits = torch.randn(5, 100).to(device, dtype)
    rows, before = np.array([4, 1, 3]), logits.clone()
    allowed = unpacked(torch.from_numpy(masks(3, 100).view(np.int32)).to(device), 100)
    ban_rows(logits, rows, allowed)
    for place, row in enumerate(rows.tolist()):
        assert torch.equal(logits[row][allowed[place]], before[row][allowed[place]])
        assert (logits[row][~allowed[place]] == float("-inf")).all()
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 33, 100, 4_096, 5_003])
def test_tokens_of_a_cpu_are_banned_alike(vocab_size: int, dtype: torch.dtype) -> None:
    wide = torch.randn(5, vocab_size + 13).to(dtype)
    wide[:, 0], wide[:, -1] = float("nan"), float("inf")
    given = wide.clone()
    rows, packed = np.array([4, 1, 3]), masks(3, vocab_size)
    expected = given[:, :vocab_size]
    ban_rows(expected, rows, unpacked(torch.from_numpy(packed.view(np.int32)), vocab_size))
    cpu_bans.ban(wide[:, :vocab_size], rows, packed)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(wide.view(bits), given.view(bits))


@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_masks_are_uploaded_without_waiting_for_the_gpu() -> None:
    device = torch.device("cuda")
    grammars = Grammars(None, 1_000, (), device)
    logits, rows = torch.randn(4, 1_000, device=device), np.array([0, 2, 3])
    grammars.unpack(masks(3, 1_000))  # memory is allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        ban_rows(logits, rows, grammars.unpack(masks(3, 1_000)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
