"""Penalties and the choice of tokens on a GPU, in one launch each: checks and launches."""

import torch
import triton

from kernels.triton.layers import DTYPES
from kernels.triton.sampling.penalty_kernel import penalty_kernel
from kernels.triton.sampling.sample_kernel import sample_kernel

SAMPLE_TILE = 4096  # logits that a program handles at once
SAMPLE_WARPS = 16
PENALTY_TILE = 2048
PENALTY_WARPS = 8


def sample(
    logits: torch.Tensor,  # [R, V], rows contiguous
    places: torch.Tensor,  # [R] int32, of a row's parameters; negative: it gets its argmax
    temperature: torch.Tensor,  # [N] float32, above 0
    top_k: torch.Tensor,  # [N] int64, 0 keeps all
    top_p: torch.Tensor,  # [N] float32, 1 keeps all
    log_min_p: torch.Tensor,  # [N] float32, -inf keeps all
    keys: torch.Tensor,  # [2, N] int32 of the Gumbel noise
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next tokens [R] int64, and which rows are broken, [R] bool.

    A row is broken if it has a NaN or an infinity, or nothing above minus infinity. Its token is a
    stopgap, the argmax of its finite logits.

    Raises:
        ValueError: shapes or types do not fit each other.
    """
    num_rows, vocab_size = logits.shape
    each = {tuple(given.shape) for given in (temperature, top_k, top_p, log_min_p)}
    (num_random,) = temperature.shape
    if len(each) != 1 or places.shape != (num_rows,) or keys.shape != (2, num_random):
        raise ValueError(f"parameters of {each} and keys {tuple(keys.shape)} for {num_rows} rows")
    if logits.dtype not in DTYPES or logits.stride(1) != 1 or not keys.is_contiguous():
        raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype}: rows not contiguous")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    broken = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            logits,
            places,
            temperature,
            top_k,
            top_p,
            log_min_p,
            keys,
            tokens,
            broken,
            logits.stride(0),
            num_random,
            VOCAB_SIZE=vocab_size,
            TILE=SAMPLE_TILE,
            num_warps=SAMPLE_WARPS,
        )
    return tokens, broken.view(torch.bool)


def penalize(
    logits: torch.Tensor,  # [R, V] float32, changed in place
    places: torch.Tensor,  # [P] int64, rows of the logits
    counts: torch.Tensor,  # [C, V] int32, see ``gpu_worker.sampling.penalties``
    rows: torch.Tensor,  # [P] int64, rows of the counts
    penalties: torch.Tensor,  # [P, 3, 1] float32: repetition, frequency, presence
) -> None:
    """Apply penalties on repetition.

    Raises:
        ValueError: shapes or types do not fit each other.
    """
    vocab_size, num_rows = logits.shape[1], len(places)
    fits = counts.shape[1] == vocab_size and penalties.shape == (num_rows, 3, 1)
    if not fits or logits.dtype != torch.float32 or logits.stride(1) != 1:
        shapes = tuple(logits.shape), tuple(counts.shape), tuple(penalties.shape)
        raise ValueError(f"logits, counts and penalties of {shapes}; logits {logits.dtype}")
    if num_rows:
        penalty_kernel[(num_rows, triton.cdiv(vocab_size, PENALTY_TILE))](
            logits,
            places,
            counts,
            rows,
            penalties,
            logits.stride(0),
            counts.stride(0),
            VOCAB_SIZE=vocab_size,
            TILE=PENALTY_TILE,
            num_warps=PENALTY_WARPS,
            enable_fp_fusion=False,  # a product is rounded before it is subtracted, as on CPUs
        )
