"""What the services say to each other, log by log.

``{E}:requests``  Submit, Stop, Abort                               gateways -> scheduler
``{E}:plans``     EpochStarted, StepPlan                            scheduler -> workers
``{E}:outputs``   EpochStarted, RequestState, StepResult, ChoiceEnded, BeamsEnded, RequestEnded
                                                                    worker, scheduler -> gateways

Keys with a time to live hold WorkerInfo (by rank) and EngineInfo.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np

from shared.codec import FloatArray, IntArray, Message, message
from shared.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words where there is one."""

    STOP = "stop"  # end-of-sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EndFlag(IntEnum):
    """How a worker marks the last token of a sequence."""

    STOP = 1
    LENGTH = 2

    def finish_reason(self) -> FinishReason:
        """The same in the words of the API."""
        return FinishReason.STOP if self is EndFlag.STOP else FinishReason.LENGTH


# ---------------------------------------------------------------- requests


@message
@dataclass(frozen=True, slots=True, eq=False)
class Submit(Message):
    """A request that a gateway accepted."""

    request_id: str  # random 128 bit, hex
    gateway: str  # instance that streams the answer
    attachment: str  # names this delivery; an Abort must repeat it
    prompt: IntArray  # [num_prompt_tokens], never empty
    sampling: SamplingParams
    received_ms: int  # the gateway's wall clock
    num_choices: int  # continuations of the one prompt, drawn independently, or beams
    priority: int  # lower is served first; equal ones in the order of arrival
    cache_salt: str  # prefixes are shared only between requests with the same salt


@message
@dataclass(frozen=True, slots=True, eq=False)
class Stop(Message):
    """The gateway found a stop string: the choice ends with ``num_tokens`` generated tokens."""

    request_id: str
    choice: int
    num_tokens: int


@message
@dataclass(frozen=True, slots=True, eq=False)
class Abort(Message):
    """Nobody waits for this request any more."""

    request_id: str
    attachment: str  # a stale one is ignored
    reason: str


# ------------------------------------------------------------------- plans


@message
@dataclass(frozen=True, slots=True, eq=False)
class EpochStarted(Message):
    """A new regime: only the parties named here may act, on entries after this one.

    Stands in both ``plans`` and ``outputs``, written in one MULTI, with id ``<epoch>-0``.
    """

    epoch: int
    scheduler: str  # instance
    workers: tuple[str, ...]  # instances, by rank


@dataclass(frozen=True, slots=True)
class Admission:
    """All that a worker must know of a sequence; it travels once.

    The same record serves new, recomputed and recovered sequences: what differs is only how many
    tokens there are and how many of them have their keys and values in the block table.
    """

    handle: int  # never reused in an epoch
    choice: int  # index in its request, part of the sampling noise
    tokens: IntArray  # [num_tokens] prompt and what was generated so far
    num_prompt_tokens: int
    num_computed: int  # tokens whose K/V already lie in the blocks
    block_table: IntArray  # [num_blocks]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The beams of one group, which compute their last tokens in this step.

    Each has an entry in ``chunk_handles``. None of them samples: the worker reports the likeliest
    continuations of all together.
    """

    group: int  # under which results speak of the group; never reused in an epoch
    handles: IntArray  # [w] its beams, in their order
    scores: FloatArray  # [w] sum of the log-probabilities of what each has generated
    parents: IntArray  # [w] sequences that the beams continue: a beam that is not its own parent
    #                    is new here, equal to it in tokens and blocks. Empty if all beams are
    #                    admitted in this plan or before, and continue nothing.
    tokens: IntArray  # [w] appended to the beams, with ``parents``


@dataclass(frozen=True, slots=True)
class Turn:
    """What the scheduler core had been given when it was asked for a plan."""

    now_ms: int
    requests_cursor: str  # last entry applied of requests
    outputs_cursor: str  # last entry applied of outputs


@message
@dataclass(frozen=True, slots=True, eq=False)
class StepPlan(Message):
    """One step, as the difference to the step before. Entry id ``<epoch>-<step>``.

    The worker applies the parts in the order of the fields, then computes:
      * for each entry of ``chunk_handles`` that many next tokens of the sequence. A chunk that
        reaches the sequence's last token samples one, and the sequence decodes from then on. A
        beam does neither: it has a BeamStep then, and a token or its end from a later plan;
      * for every other resident sequence that decodes and has not ended: its one last token,
        sampling the next. Such a sequence is not in the plan.
    """

    step: int  # dense, 1 is the first of an epoch
    now_ms: int  # the time that the scheduler core was given
    requests_cursor: str  # last entries applied before planning
    outputs_cursor: str
    outputs_min_id: str  # the worker trims outputs below this when it appends its result
    retired: IntArray  # [n] handles to forget; their blocks may be handed out again below
    beams: tuple[BeamStep, ...]  # first all new beams are made from their parents, then all grow
    swap_out_device: IntArray  # [o] blocks whose content goes
    swap_out_host: IntArray  # [o] to these blocks of the host pool, before anything else
    swap_in_host: IntArray  # [i] blocks of the host pool whose content then comes
    swap_in_device: IntArray  # [i] back to these; a host block may go to several
    copy_sources: IntArray  # [p] blocks to copy before anything is computed (copy-on-write);
    copy_targets: IntArray  # [p] no block is both a source and a target
    replaced_handles: IntArray  # [p] whose table gets the copy
    replaced_columns: IntArray  # [p] at this index
    admissions: tuple[Admission, ...]
    grown_handles: IntArray  # [m] one entry per new block, appended to the handle's table
    grown_blocks: IntArray  # [m]
    fork_parents: IntArray  # [f] handles of sequences that sample in this step
    fork_children: IntArray  # [f] new sequences, equal to the parent in tokens and blocks, that
    fork_choices: IntArray  # [f] sample from the same logits with the noise of their own choice
    chunk_handles: IntArray  # [c]
    chunk_tokens: IntArray  # [c]
    idle_turns: tuple[Turn, ...] = ()  # since the plan before, those that led to none


# ----------------------------------------------------------------- outputs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    row: int  # index into StepResult.handles, or the position in the prompt
    logprob: float  # of the token that stands there
    top_ids: IntArray  # [k] descending
    top_logprobs: FloatArray  # [k]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a run of prompt tokens, computed by a prompt chunk."""

    handle: int
    positions: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The likeliest continuations of a beam group, best first.

    ``max(2, 1 + number of end tokens) * width`` of them, so that ``width`` beams can go on however
    many end, or all there are.
    """

    group: int
    parents: IntArray  # [k] index into BeamStep.handles
    tokens: IntArray  # [k]
    scores: FloatArray  # [k] sum of log-probabilities, the parent's included
    flags: IntArray  # [k] EndFlag, 0 where the beam could go on


@message
@dataclass(frozen=True, slots=True, eq=False)
class StepResult(Message):
    """What one step produced. Entry id ``<epoch>-*``; steps are dense within an epoch."""

    step: int
    handles: IntArray  # [num_sampled]
    tokens: IntArray  # [num_sampled] one new token for each handle
    ended_rows: IntArray  # [num_ended] indices into handles
    ended_flags: IntArray  # [num_ended] EndFlag
    beams: tuple[BeamCandidates, ...]  # one for each BeamStep of the plan
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...]
    admitted_handles: IntArray  # [a] sequences that the plan admitted, and
    admitted_computed: IntArray  # [a] how many of their tokens came from the prefix cache
    num_batched_tokens: int
    model_us: int  # forward pass
    step_us: int  # all of the step, from having the plan to having the result


def _no_scores() -> FloatArray:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """One choice of a request, as the log knows it; in a beam search, one beam.

    Beams that run come in their order, then those that have finished, best first.
    """

    choice: int  # index in its request; of a beam: among those that run, or have finished
    handle: int  # StepResults speak of the choice, or of its beam group, under this from here on
    output: IntArray  # [num_generated]
    finish_reason: str  # "" while it runs
    # [num_generated] sums of log-probabilities up to each token, of a beam
    scores: FloatArray = field(default_factory=_no_scores)


@message
@dataclass(frozen=True, slots=True, eq=False)
class RequestState(Message):
    """The whole of an unfinished request at this place of the log.

    Written on acceptance, after a new epoch and before trimming. It replaces whatever a reader
    knew of the request, and retires its earlier handles.
    """

    submit: Submit
    choices: tuple[ChoiceState, ...]
    requests_cursor: str  # requests up to here are in outputs: gateways may trim them


@message
@dataclass(frozen=True, slots=True, eq=False)
class RequestEnded(Message):
    """A request ended otherwise than by the flags of its StepResults. The first one counts."""

    request_id: str
    reason: str  # FinishReason
    error: str  # "" unless reason is "error"
    requests_cursor: str


@message
@dataclass(frozen=True, slots=True, eq=False)
class ChoiceEnded(Message):
    """One of several choices ended otherwise than by a flag; the request goes on."""

    request_id: str
    choice: int
    reason: str  # FinishReason
    requests_cursor: str


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    tokens: IntArray  # [num_generated]
    scores: FloatArray  # [num_generated] sums of log-probabilities up to each token
    score: float  # the last of them, divided by num_generated ** length_penalty
    finish_reason: str  # FinishReason


@message
@dataclass(frozen=True, slots=True, eq=False)
class BeamsEnded(Message):
    """A beam search is over: all of its choices at once, best first. The request has ended."""

    request_id: str
    hypotheses: tuple[Hypothesis, ...]  # as many as the request has choices
    requests_cursor: str


# -------------------------------------------------------------------- keys


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What gateways and scheduler must know of the model."""

    name: str  # as clients name it
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    dtype: str
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The device pool."""

    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int  # K and V, all layers
    num_host_blocks: int  # of the host pool, for swapping


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Speeds:
    """What preemption costs on this machine, measured at start."""

    prefill_tokens_per_s: float
    swap_bytes_per_s: float  # between the two pools, either way


@message
@dataclass(frozen=True, slots=True, eq=False)
class WorkerInfo(Message):
    """A worker's lease; renewed by the loop that executes plans."""

    instance: str
    rank: int
    state: str  # WorkerState
    detail: str  # why it failed
    model: ModelInfo | None
    kv: KVGeometry | None
    speeds: Speeds | None


class EngineState(StrEnum):
    STARTING = "starting"  # no worker yet
    READY = "ready"
    FAILED = "failed"  # the worker says that the model cannot be served


@message
@dataclass(frozen=True, slots=True, eq=False)
class EngineInfo(Message):
    """An engine's lease; renewed by the scheduler's loop."""

    engine_id: str
    scheduler: str
    epoch: int
    state: str  # EngineState
    detail: str
    model: ModelInfo | None
    kv: KVGeometry | None
    max_num_sequences: int  # that run at once: a request cannot have more choices
    num_running: int
    num_waiting: int
