"""What of a job changes from step to step, for each kind of job.

Whoever keeps a job to run it again needs to know no more than this (see captured_graph).
"""

from dataclasses import dataclass
from enum import IntEnum

from kernels.cpu.linear import linear_arguments as linear
from kernels.cpu.runtime import kernel_arguments as jobs
from kernels.cpu.sampling import pruned_argmax_arguments as pruned_argmax
from kernels.cpu.sampling import sample_arguments as sample


class OfStep(IntEnum):
    """Numbers that are the same for all layers of a step."""

    SLOTS = 0
    TABLES = 1
    TABLE_ROW = 2
    CONTEXT_LENS = 3
    QUERY_STARTS = 4
    NUM_SEQS = 5
    TOKEN_IDS = 6
    POSITIONS = 7


@dataclass(frozen=True, slots=True)
class JobKind:
    """Fields by their places.

    Attributes:
        num_fields: of a job.
        rows: how many rows there are, a multiple of the step's tokens.
        chunk: rows that one task handles, all of them up to ``most_chunk``.
        scratch: address of the threads' scratch; the field behind it has the bytes of each.
        of_step: what else a step decides.
    """

    num_fields: int
    rows: int | None = None
    chunk: int | None = None
    most_chunk: int = 0
    scratch: int | None = None
    of_step: tuple[tuple[int, OfStep], ...] = ()


LINEAR = JobKind(
    linear.LINEAR_FIELDS,
    rows=linear.NUM_ROWS,
    chunk=linear.CHUNK_ROWS,
    most_chunk=linear.MOST_CHUNK_ROWS,
    scratch=linear.SCRATCH,
)
NORM = JobKind(linear.NORM_FIELDS, rows=linear.NORM_ROWS)
ROTARY = JobKind(linear.ROTARY_FIELDS, rows=linear.ROTARY_TOKENS)
ADD = JobKind(linear.ADD_FIELDS, rows=linear.ADD_ELEMENTS)
ACTIVATE = JobKind(linear.ACTIVATE_FIELDS, rows=linear.ACTIVATE_ELEMENTS)
WRITE = JobKind(jobs.WRITE_FIELDS, rows=jobs.NUM_TOKENS, of_step=((jobs.SLOTS, OfStep.SLOTS),))
ATTEND = JobKind(
    jobs.ATTEND_FIELDS,
    scratch=jobs.SCRATCH,
    of_step=(
        (jobs.TABLES, OfStep.TABLES),
        (jobs.TABLE_ROW, OfStep.TABLE_ROW),
        (jobs.CONTEXT_LENS, OfStep.CONTEXT_LENS),
        (jobs.QUERY_STARTS, OfStep.QUERY_STARTS),
        (jobs.NUM_SEQS, OfStep.NUM_SEQS),
    ),
)
LOOKUP_OF_TOKENS = JobKind(
    jobs.LOOKUP_FIELDS, rows=jobs.NUM_INDICES, of_step=((jobs.INDICES, OfStep.TOKEN_IDS),)
)
LOOKUP_OF_POSITIONS = JobKind(
    jobs.LOOKUP_FIELDS, rows=jobs.NUM_INDICES, of_step=((jobs.INDICES, OfStep.POSITIONS),)
)
PRUNED_ARGMAX = JobKind(
    pruned_argmax.NUM_ARGUMENTS, rows=pruned_argmax.NUM_ROWS, scratch=pruned_argmax.SCRATCH
)
SAMPLE = JobKind(sample.NUM_ARGUMENTS)
MOVE = JobKind(jobs.MOVE_FIELDS)
TAPE = JobKind(jobs.TAPE_FIELDS)
