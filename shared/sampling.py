"""How the next token of a sequence is chosen: the table of sampling parameters.

Each parameter is declared once, as a field of ``SamplingParams`` with a ``Parameter``. From there
follow the field of the request's body with its bounds and errors (gateway), the wire format, the
column of the worker's batch, and the argument of the sampling kernel on CPUs.

A parameter that filters the tokens to sample from touches these files:

1. ``shared/sampling.py``: its declaration.
2. ``kernels/cpu/sampling/sample_kernel.py``: its effect on CPUs.
3. ``kernels/triton/sampling/sample_kernel.py``: its effect on GPUs;
   ``gpu_worker/sampling/device_sampling.py`` copies it there.
4. ``tests/gpu_worker/sampling/torch_sampler.py``: the reference of both.
5. ``tests/gpu_worker/sampling/test_sampler.py``: a test of its effect.
6. ``docs/API.md``: its name, for clients.

One that changes logits has its effect in ``gpu_worker/sampling/penalties.py``, ``cpu_penalties.py``
and ``kernels/triton/sampling/penalty_kernel.py`` instead of files 2 and 3. Until a parameter is
declared ``with_beams``, beam searches refuse it by name.
"""

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np

LOWEST_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: logits that are divided by less may not be finite."""

LEAST_TOP_P = 2.0**-126
"""Positive in single precision; keeps the most likely token alone."""


class Effect(Enum):
    """What a parameter acts on."""

    SAMPLE = "the distribution that a token is sampled from; an argument of the samplers"
    SEED = "the random numbers of the samplers"
    LOGITS = "the model's logits"
    END = "when the sequence ends"


class EarlyStopping(StrEnum):
    """When a beam search ends that has as many finished beams as its width."""

    AT_ONCE = "true"
    ESTIMATED = "false"  # once a running beam, scored at its present length, cannot be among them
    NEVER = "never"  # the same, scored at the length with its highest score


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search, named and defined as those of transformers' ``generate``."""

    width: int  # beams kept, >= 1
    length_penalty: float  # a finished beam's score is its log-probability / length ** this
    early_stopping: str  # EarlyStopping


@dataclass(frozen=True, slots=True)
class TokenBias:
    """A number that is added to the logit of one token."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class Parameter:
    """One sampling parameter.

    Attributes:
        effect: what it acts on.
        default: value where a request gives none.
        neutral: value without effect: of beam searches, and of unused rows of the batch.
        minimum, maximum: inclusive bounds of the request's number, or of each bias.
        below: exclusive upper bound.
        max_entries: of a list or map.
        convert: makes the value from what a request gives; by default they are equal.
        column: type of the batch's column; None: the batch has no column of this name.
        with_beams: whether a beam search takes it.
        description: for the API's description.
        name: of the field, filled in by the table.
        kind: type of the field, filled in by the table.
    """

    effect: Effect
    default: Any
    neutral: Any
    minimum: float | None = None
    maximum: float | None = None
    below: int | None = None
    max_entries: int | None = None
    convert: Callable[[Any], Any] | None = None
    column: type[np.generic] | None = None
    with_beams: bool = False
    description: str | None = None
    name: str = ""
    kind: Any = None

    def value(self, given: Any) -> Any:
        """The field's value for what a request gives: None, or a value within the bounds."""
        if given is None:
            return self.default
        value = given if self.convert is None else self.convert(given)
        return self.default if value == self.default else value  # 0.0 for -0.0


def _biases(given: Mapping[str, float]) -> tuple[TokenBias, ...]:
    return tuple(TokenBias(int(token), bias) for token, bias in given.items() if bias != 0)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a sequence, validated by the gateway and not by the worker.

    The sampled token is a pure function of the logits and of (``seed``, index of the choice,
    position, token id). So a request that is preempted, recovered or moved gets equal tokens.

    A field that is added needs a default with no effect: older writers do not send it.
    """

    max_tokens: int  # tokens to generate at most, >= 1
    temperature: Annotated[
        float,  # 0, and all below LOWEST_TEMPERATURE, is greedy
        Parameter(Effect.SAMPLE, default=1.0, neutral=0.0, minimum=0, maximum=2, column=np.float32),
    ]
    top_p: Annotated[
        float,  # (0, 1]; a request's 0 keeps the most likely token alone
        Parameter(
            Effect.SAMPLE,
            default=1.0,
            neutral=1.0,
            minimum=0,
            maximum=1,
            convert=lambda top_p: max(top_p, LEAST_TOP_P),
            column=np.float32,
        ),
    ]
    top_k: Annotated[
        int,  # 0 keeps all, as does a request's -1
        Parameter(
            Effect.SAMPLE,
            default=0,
            neutral=0,
            minimum=-1,
            below=2**31,
            convert=lambda top_k: max(top_k, 0),
            column=np.int64,
        ),
    ]
    min_p: Annotated[
        float,  # [0, 1]
        Parameter(Effect.SAMPLE, default=0.0, neutral=0.0, minimum=0, maximum=1, column=np.float32),
    ]
    seed: Annotated[
        int,  # [0, 2**63)
        Parameter(
            Effect.SEED,
            default=None,  # the gateway chooses one
            neutral=0,
            minimum=-(2**63),
            maximum=2**63 - 1,
            convert=lambda seed: seed % 2**63,
            column=np.uint64,
            with_beams=True,  # the same beams for every seed
        ),
    ]
    stop_token_ids: Annotated[
        tuple[int, ...],  # end the sequence; the token itself is part of the output
        Parameter(
            Effect.END, default=(), neutral=(), max_entries=256, convert=tuple, with_beams=True
        ),
    ]
    ignore_eos: Annotated[
        bool,
        Parameter(Effect.END, default=False, neutral=False, column=np.bool_, with_beams=True),
    ]
    min_tokens: Annotated[
        int,  # before, neither end-of-sequence nor stop tokens are chosen
        Parameter(Effect.END, default=0, neutral=0, minimum=0, with_beams=True),
    ]
    num_logprobs: int | None  # None: no log-probabilities; k: the chosen token's and the top k
    num_prompt_logprobs: int | None  # likewise for every prompt token but the first
    beams: BeamParams | None = None  # None: no beam search
    presence_penalty: Annotated[
        float,
        Parameter(
            Effect.LOGITS,
            default=0.0,
            neutral=0.0,
            minimum=-2.0,
            maximum=2.0,
            description="Subtracted from the logits of tokens that were generated. Reported "
            "log-probabilities are the model's own, without any penalty or bias.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            Effect.LOGITS,
            default=0.0,
            neutral=0.0,
            minimum=-2.0,
            maximum=2.0,
            description="Subtracted from the logits of tokens for each time that they were "
            "generated.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            Effect.LOGITS,
            default=1.0,
            neutral=1.0,
            minimum=0.01,
            maximum=100.0,
            description="Of tokens that are in the prompt or were generated, positive logits are "
            "divided by this, and others multiplied. 1: none.",
        ),
    ] = 1.0
    logit_bias: Annotated[
        tuple[TokenBias, ...],  # of different tokens
        Parameter(
            Effect.LOGITS,
            default=(),
            neutral=(),
            minimum=-100.0,
            maximum=100.0,
            max_entries=300,
            convert=_biases,
            description="Added to the logits of tokens, by their ids.",
        ),
    ] = ()
    grammar: str = ""  # that the text follows, in llguidance's format; "": none

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, and none is sampled."""
        return self.temperature < LOWEST_TEMPERATURE

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on how often each token is in the prompt and the output."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the model's."""
        return any(getattr(self, each.name) != each.neutral for each in _LOGIT_PARAMETERS)

    @staticmethod
    def greedy(max_tokens: int) -> "SamplingParams":
        """The most likely tokens, ``max_tokens`` of them, and nothing else."""
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


def _table() -> Mapping[str, Parameter]:
    hints = typing.get_type_hints(SamplingParams, include_extras=True)
    found = {}
    for field in fields(SamplingParams):
        for each in getattr(hints[field.name], "__metadata__", ()):
            kind = hints[field.name].__origin__
            found[field.name] = replace(each, name=field.name, kind=kind)
    return MappingProxyType(found)


PARAMETERS = _table()
"""The parameters that requests may give, by name, in the order of the wire.

The gateway itself fills the other fields of ``SamplingParams``.
"""

_LOGIT_PARAMETERS = tuple(each for each in PARAMETERS.values() if each.effect is Effect.LOGITS)
