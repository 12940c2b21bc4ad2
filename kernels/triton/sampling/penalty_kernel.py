"""The Triton kernel of penalties on repetition."""

import triton
import triton.language as tl


@triton.jit
def penalty_kernel(  # type: ignore[no-untyped-def]
    logits,  # [R, V] float32, changed in place
    logit_rows,  # [P] int64
    counts,  # [C, V] int32: 2 for each time that a token was generated, 1 more if the prompt has it
    rows,  # [P] int64, rows of the counts
    penalties,  # [P, 3] float32: repetition, frequency, presence
    row_stride,
    count_stride,
    VOCAB_SIZE: tl.constexpr,  # V
    TILE: tl.constexpr,
):
    """Change one tile of one row. Grid: (P, tiles of V)."""
    index = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    is_there = token < VOCAB_SIZE
    at = logits + tl.load(logit_rows + index) * row_stride + token
    logit = tl.load(at, mask=is_there, other=0.0)
    count = tl.load(counts + tl.load(rows + index) * count_stride + token, mask=is_there, other=0)
    repetition = tl.load(penalties + 3 * index)
    frequency = tl.load(penalties + 3 * index + 1)
    presence = tl.load(penalties + 3 * index + 2)
    repeated = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(count > 0, repeated, logit)
    generated = count >> 1
    logit -= frequency * generated.to(tl.float32)
    logit -= presence * (generated > 0).to(tl.float32)
    tl.store(at, logit, mask=is_there)
