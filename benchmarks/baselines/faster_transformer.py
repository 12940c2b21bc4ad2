"""Request-level batching (PagedAttention, section 6.1): a batch starts and ends as a whole."""

from collections import deque

from benchmarks.baselines.continuous import num_sequences
from benchmarks.simulator.system import MemoryUse, Progress, SimRequest, Work


class FasterTransformer:
    """Batches the earliest requests, as many as fit, and runs each batch to its end.

    Every sequence has room for the model's maximum, so the largest batch is the memory divided by
    that. Prompts are padded to the longest one. Rows whose output is complete compute on until the
    last one is; then all requests are answered.

    Args:
        num_slots: tokens of KV memory.
        max_len: tokens of the longest sequence that the model can have.
    """

    def __init__(self, num_slots: int, max_len: int = 2_048) -> None:
        self._num_slots = num_slots
        self._max_len = max_len
        self.largest_batch = num_slots // max_len
        if not self.largest_batch:
            raise ValueError(f"{num_slots} slots do not hold one sequence of {max_len}")
        self._waiting: deque[SimRequest] = deque()
        self._batch: list[SimRequest] = []
        self._num_rows = 0
        self._padded = 0  # tokens of the longest prompt
        self._num_generated = 0

    def submit(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it is longer than the model, or wider than the largest batch.
        """
        length = request.prompt_tokens + request.output_tokens
        if length > self._max_len:
            raise ValueError(f"{length} tokens, at most {self._max_len} are possible")
        if num_sequences(request) > self.largest_batch:
            raise ValueError(
                f"{num_sequences(request)} sequences, {self.largest_batch} fit into the memory"
            )
        self._waiting.append(request)

    def start(self, now_s: float) -> Work | None:  # noqa: ARG002
        """Compute the next token of the batch, or start a new batch."""
        if not self._batch:
            self._fill()
            if not self._batch:
                return None
            rows, padded = self._num_rows, self._padded
            return Work(
                prefill_tokens=rows * padded,
                prefill_context=rows * padded * (padded + 1) // 2,
                sampled_rows=rows,
            )
        context = self._padded + self._num_generated
        return Work(
            decode_tokens=self._num_rows,
            decode_context=self._num_rows * context,
            sampled_rows=self._num_rows,
        )

    def finish(self, now_s: float) -> Progress:  # noqa: ARG002
        """End an iteration: incomplete requests have a token more; the last one ends the batch."""
        self._num_generated += 1
        rows = [num_sequences(each) for each in self._batch if self._needs_more(each)]
        firsts = tuple(each.id for each in self._batch) if self._num_generated == 1 else ()
        done: tuple[int, ...] = ()
        if self._num_generated == max(each.output_tokens for each in self._batch):
            done = tuple(each.id for each in self._batch)
            self._batch = []
        return Progress(firsts, done, sum(rows))

    def memory(self) -> MemoryUse:
        """Memory use; prompts count with their own length, and padding counts as never used."""
        states = needed = 0
        for each in self._batch:
            rows = num_sequences(each)
            generated = min(self._num_generated, each.output_tokens)
            states += rows * (each.prompt_tokens + generated)
            needed += rows * (each.prompt_tokens + each.output_tokens)
        given = self._num_rows * self._max_len if self._batch else 0
        left = self._num_slots - given
        lost = left if self._batch and self._waiting else left % self._max_len
        return MemoryUse(
            self._num_slots, states, needed - states, given - needed, lost, left - lost
        )

    @property
    def num_running(self) -> int:
        """Running requests, complete ones of the batch included."""
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        """Always 0: memory is reserved from the start."""
        return 0

    def _fill(self) -> None:
        self._num_rows = self._num_generated = 0
        while self._waiting:
            rows = num_sequences(self._waiting[0])
            if self._num_rows + rows > self.largest_batch:
                break
            self._num_rows += rows
            self._batch.append(self._waiting.popleft())
        self._padded = max((each.prompt_tokens for each in self._batch), default=0)

    def _needs_more(self, request: SimRequest) -> bool:
        return self._num_generated <= request.output_tokens
