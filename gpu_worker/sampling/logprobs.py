"""Log-probabilities of the model itself: before penalties, temperature, filters and bans."""

import torch

from gpu_worker.batch.rows import ChunkRows
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import PromptLogprobs

_ROWS_AT_ONCE = 64  # bounds the float32 copy of logits


def token_logprobs(
    logits: torch.Tensor,  # [n, V]
    tokens: torch.Tensor,  # [n] int64, the chosen tokens
    names: list[int],  # [n] TokenLogprobs.row of each
    num_top: list[int],  # [n] top log-probabilities to report
) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens and of the top ones, row by row."""
    found: list[TokenLogprobs] = []
    for first in range(0, len(names), _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, len(names))
        logprobs = logits[first:last].float().log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[first:last].unsqueeze(1)).squeeze(1).tolist()
        width = min(max(num_top[first:last]), logprobs.shape[1])
        top = logprobs.topk(width, dim=-1)
        values, ids = top.values.cpu().numpy(), top.indices.int().cpu().numpy()
        for index, row in enumerate(range(first, last)):
            k = num_top[row]
            found.append(TokenLogprobs(names[row], own[index], ids[index, :k], values[index, :k]))
    return found


def prompt_logprobs(
    logits: torch.Tensor,  # [n, V] of the chunk's first rows
    chunk: ChunkRows,
) -> PromptLogprobs:
    """Log-probabilities of the prompt tokens that follow those rows."""
    assert chunk.num_prompt_logprobs is not None
    first, num = chunk.start + 1, chunk.num_scored
    tokens = torch.from_numpy(chunk.tokens[1 : 1 + num].astype("int64"))
    return PromptLogprobs(
        chunk.handle,
        tuple(
            token_logprobs(
                logits,
                tokens.to(logits.device),
                list(range(first, first + num)),
                [chunk.num_prompt_logprobs] * num,
            )
        ),
    )
