"""Requests that compute in every iteration until each is complete (Orca, section 3.1).

Every running sequence grows by one token per iteration, so that an iteration touches only sums and
a calendar of endings.
"""

from collections import defaultdict
from dataclasses import dataclass

from benchmarks.simulator.system import Progress, SimRequest, Work


@dataclass(slots=True, eq=False)
class Job:
    """A request and its progress.

    Attributes:
        num_generated: tokens of each of its sequences, when it last joined or left the batch.
        joined_at: number of iterations that had ended then.
    """

    request: SimRequest
    num_generated: int = 0
    joined_at: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that it generates in parallel."""
        return num_sequences(self.request)

    @property
    def num_tokens(self) -> int:
        """Tokens of one sequence, when the job last joined or left."""
        return self.request.prompt_tokens + self.num_generated


class ContinuousBatch:
    """The running jobs, and the work of the next iteration."""

    def __init__(self) -> None:
        self.num_iterations = 0  # that have ended
        self.num_states = 0  # tokens of all sequences
        self.jobs: dict[int, Job] = {}  # by request, in the order in which they joined
        self._joining: list[Job] = []
        self._ends: defaultdict[int, list[Job]] = defaultdict(list)
        self._num_decoding = 0  # sequences
        self._decode_context = 0

    def join(self, job: Job) -> None:
        """Add a job: it computes all its tokens in the next iteration, then one per sequence."""
        job.joined_at = self.num_iterations
        self.jobs[job.request.id] = job
        self._joining.append(job)
        self.num_states += job.num_sequences * job.num_tokens
        remaining = job.request.output_tokens - job.num_generated
        self._ends[self.num_iterations + remaining].append(job)

    def leave(self, job: Job) -> None:
        """Remove a job before it is complete; it has computed at least once."""
        num_generated = self.num_generated(job)
        remaining = job.request.output_tokens - num_generated
        self._ends[self.num_iterations + remaining].remove(job)
        job.num_generated = num_generated
        self._remove(job)

    def num_generated(self, job: Job) -> int:
        """Tokens of each sequence of a running job."""
        return job.num_generated + self.num_iterations - job.joined_at

    def work(self) -> Work:
        """The work of the next iteration; every sequence computes its own prompt."""
        new = [(job.num_sequences, job.num_tokens) for job in self._joining]
        return Work(
            prefill_tokens=sum(rows * length for rows, length in new),
            prefill_context=sum(rows * length * (length + 1) // 2 for rows, length in new),
            decode_tokens=self._num_decoding,
            decode_context=self._decode_context,
            sampled_rows=self._num_decoding + sum(rows for rows, _ in new),
        )

    def advance(self) -> Progress:
        """End an iteration: each sequence has a token more, and complete jobs leave."""
        joined, self._joining = self._joining, []
        first = [job.request.id for job in joined if job.num_generated == 0]
        self.num_iterations += 1
        self._decode_context += self._num_decoding
        for job in joined:
            self._num_decoding += job.num_sequences
            self._decode_context += job.num_sequences * (job.num_tokens + 1)
        self.num_states += self._num_decoding
        num_tokens = self._num_decoding
        done = self._ends.pop(self.num_iterations, [])
        for job in done:
            job.num_generated = job.request.output_tokens
            self._remove(job)
        return Progress(tuple(first), tuple(job.request.id for job in done), num_tokens)

    def _remove(self, job: Job) -> None:
        del self.jobs[job.request.id]
        self._num_decoding -= job.num_sequences
        self._decode_context -= job.num_sequences * job.num_tokens
        self.num_states -= job.num_sequences * job.num_tokens


def num_sequences(request: SimRequest) -> int:
    """Sequences that a request generates in parallel."""
    return max(1, request.num_samples, request.beam_width)
