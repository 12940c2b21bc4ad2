"""What stands in ``{E}:plans``, from the scheduler to workers; EpochStarted in outputs, too."""

from dataclasses import dataclass, field

import numpy as np

from shared.codec import FloatArray, IntArray, Message, message
from shared.sampling import SamplingParams


def _no_ints() -> IntArray:
    return np.empty(0, np.int32)


@message
@dataclass(frozen=True, slots=True, eq=False)
class EpochStarted(Message):
    """A new regime: only the parties named here may act, on entries after this one.

    Stands in both ``plans`` and ``outputs``, written in one MULTI, with id ``<epoch>-0``.
    """

    epoch: int
    scheduler: str  # instance
    workers: tuple[str, ...]  # instances, by rank
    suspects: IntArray = field(default_factory=_no_ints)  # [n] handles, of the epoch before, of
    #                                       sequences in plans that the worker did not survive
    nonce: str = ""  # tells it from one of the same number that the log has lost


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
class Tick:
    """A moment at which the core was asked for a plan, and what it had applied by then."""

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
    idle_turns: tuple[Tick, ...] = ()  # ticks since the plan before, which led to no plan
