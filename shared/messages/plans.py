"""Messages of ``{E}:plans``, from the scheduler to workers; EpochStarted is in outputs, too."""

from dataclasses import dataclass, field

import numpy as np

from shared.codec import FloatArray, IntArray, Message, message
from shared.sampling import SamplingParams


def _no_ints() -> IntArray:
    return np.empty(0, np.int32)


@message
@dataclass(frozen=True, slots=True, eq=False)
class EpochStarted(Message):
    """The start of an epoch, in which only the instances named here read and write the logs.

    The first entry of the epoch in both ``plans`` and ``outputs``, with id ``<epoch>-0``; one MULTI
    appends both.
    """

    epoch: int
    scheduler: str  # instance
    workers: tuple[str, ...]  # instances, by rank
    suspects: IntArray = field(default_factory=_no_ints)  # [n] handles, of the epoch before, of
    #                                       sequences in plans that the worker did not survive
    nonce: str = ""  # differs from that of a lost epoch with the same number


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that begins to run, with all data that the worker needs of it; sent once.

    New, recomputed and recovered sequences differ only in the number of tokens, and in how many of
    them have keys and values in the block table.
    """

    handle: int  # never reused in an epoch
    choice: int  # index in its request, part of the sampling noise
    tokens: IntArray  # [num_tokens] prompt, and tokens generated so far
    num_prompt_tokens: int
    num_computed: int  # tokens whose K/V already lie in the blocks
    block_table: IntArray  # [num_blocks]
    sampling: SamplingParams
    grammar_of: int = 0  # handle of an earlier admission of this plan, of the same request: this
    #                      one follows its grammar, and has none of its own; 0: it is its own

    @property
    def has_grammar(self) -> bool:
        """Whether the text follows a grammar."""
        return self.sampling.grammar != "" or self.grammar_of != 0


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The beams of one group, which compute their last tokens in this step.

    Each has an entry in ``chunk_handles``. None of them samples: the worker reports the most likely
    continuations of all of them together.
    """

    group: int  # number of the group in results; never reused in an epoch
    handles: IntArray  # [w] its beams, in their order
    scores: FloatArray  # [w] sum of the log-probabilities of what each has generated
    parents: IntArray  # [w] sequences that the beams continue: a beam that is not its own parent
    #                    is new here, equal to it in tokens and blocks. Empty if all beams are
    #                    admitted in this plan or before, and continue nothing.
    tokens: IntArray  # [w] appended to the beams, with ``parents``


@dataclass(frozen=True, slots=True)
class PlannedPreemption:
    """A group that lost its blocks in a plan, and what the decision followed from."""

    request_id: str
    by: str  # request that needed the blocks, or the same one
    kind: str  # "recompute" or "swap"
    num_tokens: int  # that had keys and values
    num_blocks: int  # of the group
    num_free_blocks: int  # of the device, before
    num_free_host_blocks: int  # before
    is_displaced: bool = False  # by a waiting request of a tenant that had nothing running


@dataclass(frozen=True, slots=True)
class Tick:
    """A call of the core for a plan: its time, and the last entries applied before it."""

    now_ms: int
    requests_cursor: str  # last entry applied of requests
    outputs_cursor: str  # last entry applied of outputs


@message
@dataclass(frozen=True, slots=True, eq=False)
class StepPlan(Message):
    """The plan of one step, as the difference to the step before. Entry id ``<epoch>-<step>``.

    The worker applies the parts in the order of the fields, then computes:
      * for each entry of ``chunk_handles``, the given number of next tokens of the sequence. If the
        chunk reaches the sequence's last token, a token is sampled, and the sequence decodes from
        then on. A beam does neither: it has a BeamStep, and a later plan continues or ends it;
      * for every other resident sequence that decodes and has not ended, its last token, from which
        the next one is sampled. Such a sequence is not in the plan.
    """

    step: int  # dense, 1 is the first of an epoch
    now_ms: int  # time of planning
    requests_cursor: str  # last entries applied before planning
    outputs_cursor: str
    outputs_min_id: str  # the worker trims outputs below this when it appends its result
    retired: IntArray  # [n] handles to drop; later parts of this plan may use their blocks
    beams: tuple[BeamStep, ...]  # new beams are forked from their parents, then all are extended
    swap_out_device: IntArray  # [o] blocks to copy to the host pool, before all other copies
    swap_out_host: IntArray  # [o] their targets
    swap_in_host: IntArray  # [i] blocks of the host pool to copy back, after that
    swap_in_device: IntArray  # [i] their targets; a host block may have several
    copy_sources: IntArray  # [p] blocks to copy before anything is computed (copy-on-write)
    copy_targets: IntArray  # [p] their targets; no block is both a source and a target
    replaced_handles: IntArray  # [p] the sequence whose table gets the target
    replaced_columns: IntArray  # [p] its index in that table
    admissions: tuple[Admission, ...]
    grown_handles: IntArray  # [m] sequences whose tables get another block
    grown_blocks: IntArray  # [m] these blocks
    fork_parents: IntArray  # [f] handles of sequences that sample in this step
    fork_children: IntArray  # [f] new sequences, equal to the parent in tokens and blocks
    fork_choices: IntArray  # [f] their choices; each samples the parent's logits with its own noise
    chunk_handles: IntArray  # [c]
    chunk_tokens: IntArray  # [c]
    idle_turns: tuple[Tick, ...] = ()  # calls since the plan before that gave no plan
    preemptions: tuple[PlannedPreemption, ...] = ()  # for readers of the log; workers ignore them
