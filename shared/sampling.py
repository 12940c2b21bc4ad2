"""How the next token of a sequence is chosen: plain data that travels with the request."""

from dataclasses import dataclass
from enum import StrEnum

LOWEST_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: logits that are divided by less may not be finite."""


class EarlyStopping(StrEnum):
    """When a beam search ends that has as many finished beams as it is wide."""

    AT_ONCE = "true"
    ESTIMATED = "false"  # once a running beam, scored at its present length, cannot be among them
    NEVER = "never"  # the same, scored at the length that suits it best


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search in the words, and with the meaning, of transformers' ``generate``."""

    width: int  # beams kept, >= 1
    length_penalty: float  # a finished beam's score is its log-probability / length ** this
    early_stopping: str  # EarlyStopping


@dataclass(frozen=True, slots=True)
class TokenBias:
    """What is added to the logit of one token."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the gateway; the worker trusts it.

    The draw is a pure function of (``seed``, sequence index, position, token id), so a request
    that is preempted, recovered or moved draws the same tokens again.
    """

    max_tokens: int  # tokens to generate at most, >= 1
    temperature: float  # 0, and all below LOWEST_TEMPERATURE, is greedy
    top_p: float  # (0, 1]
    top_k: int  # 0 keeps all
    min_p: float  # [0, 1]
    seed: int  # [0, 2**63)
    stop_token_ids: tuple[int, ...]  # end the sequence; the token itself is part of the output
    ignore_eos: bool
    min_tokens: int  # end-of-sequence and stop tokens cannot be drawn before
    num_logprobs: int | None  # None: no log-probabilities; k: the chosen token's and the top k
    num_prompt_logprobs: int | None  # likewise for every prompt token but the first
    beams: BeamParams | None = None  # instead of drawing, which the rest is then neutral for
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were generated
    frequency_penalty: float = 0.0  # the same for each time that they were
    repetition_penalty: float = 1.0  # > 0; of tokens in the prompt or generated, positive logits
    #                                  are divided by this, others multiplied
    logit_bias: tuple[TokenBias, ...] = ()  # of different tokens

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, and nothing is drawn."""
        return self.temperature < LOWEST_TEMPERATURE

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on how often each token was there."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the model's."""
        return self.has_penalty or bool(self.logit_bias)

    @staticmethod
    def greedy(max_tokens: int) -> "SamplingParams":
        """The likeliest tokens, so many of them, and nothing else."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=0,
            stop_token_ids=(),
            ignore_eos=True,
            min_tokens=0,
            num_logprobs=None,
            num_prompt_logprobs=None,
        )
