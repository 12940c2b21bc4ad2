"""Admissions with penalties, and what transformers and OpenAI's formula make of logits."""

from collections.abc import Sequence

import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from shared.messages.plans import Admission
from shared.sampling import SamplingParams
from tests.gpu_worker.planner import ints, sampling

REPEATED = sampling(repetition_penalty=1.4)


def admission(
    handle: int, tokens: Sequence[int], num_prompt_tokens: int, params: SamplingParams
) -> Admission:
    return Admission(handle, 0, ints(*tokens), num_prompt_tokens, 0, ints(), params)


def expected(
    logits: torch.Tensor,  # [V]
    tokens: Sequence[int],
    num_prompt_tokens: int,
    params: SamplingParams,
) -> torch.Tensor:
    """Logits [V] as transformers changes them, and OpenAI's formula after it."""
    ids, scores = torch.tensor([list(tokens)]), logits.float().unsqueeze(0)
    if params.logit_bias:
        biases = {(entry.token,): entry.bias for entry in params.logit_bias}
        scores = SequenceBiasLogitsProcessor(biases)(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)[0]
    generated = torch.bincount(ids[0, num_prompt_tokens:], minlength=len(scores))
    scores = scores - params.frequency_penalty * generated
    found: torch.Tensor = scores - params.presence_penalty * (generated > 0)
    return found


def penalize(
    wide: torch.Tensor,  # [R, V] float32, changed in place
    places: torch.Tensor,  # [P] rows of the logits
    counts: torch.Tensor,  # [C, V]
    rows: torch.Tensor,  # [P] rows of the counts
    penalties: torch.Tensor,  # [P, 3, 1]
) -> None:
    """Apply penalties with torch's operators, the reference of the kernels on CPUs and GPUs."""
    counted = counts[rows]  # [P, V]
    repetition, frequency, presence = penalties.unbind(1)  # [P, 1] each
    logits = wide[places]  # [P, V]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counted > 0, repeated, logits)
    generated = counted >> 1  # [P, V]
    logits -= frequency * generated
    logits -= presence * (generated > 0)
    wide[places] = logits
