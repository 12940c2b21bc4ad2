"""A model that never draws the same token twice.

So whatever is computed again has another text, and a splice of two of them can be seen: of every
token it is known which tokens it was drawn after.
"""

from dataclasses import replace
from random import Random

import numpy as np

from shared.messages.endings import EndFlag
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan
from tests.support.fake_worker import FakeWorker, Resident

BLOCK_SIZE = 4
_FIRST_DRAWN = 1_000
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


class Model:
    """All that was ever drawn.

    Args:
        end_share: of the tokens, which end their sequence.
    """

    def __init__(self, rng: Random, end_share: float) -> None:
        self._rng = rng
        self._end_share = end_share
        self._before: list[tuple[int, ...]] = []
        self._ends: set[int] = set()

    def draw(self, before: tuple[int, ...]) -> tuple[int, bool]:
        """A new token, and whether it ends the sequence."""
        token = _FIRST_DRAWN + len(self._before)
        self._before.append(before)
        if self._rng.random() < self._end_share:
            self._ends.add(token)
        return token, token in self._ends

    @property
    def num_drawn(self) -> int:
        """Tokens so far."""
        return len(self._before)

    def drawn_after(self, token: int) -> tuple[int, ...]:
        """The tokens of the sequence that this one was drawn for."""
        return self._before[token - _FIRST_DRAWN]

    def num_drawn_after(self, prompt: tuple[int, ...]) -> int:
        """Tokens that were drawn for sequences that begin like this."""
        return sum(before[: len(prompt)] == prompt for before in self._before)

    def has_finished(self, prompt: tuple[int, ...], max_tokens: int) -> bool:
        """Some sequence that begins like this has come to its end."""
        return any(
            before[: len(prompt)] == prompt
            and (len(before) == len(prompt) + max_tokens - 1 or _FIRST_DRAWN + number in self._ends)
            for number, before in enumerate(self._before)
        )

    @staticmethod
    def logprob(token: int) -> float:
        """What every result must say of it; exact in float32."""
        return -(token % 97) / 16

    def ends(self, token: int) -> bool:
        """Whether it ended its sequence."""
        return token in self._ends


class _Worker(FakeWorker):
    def __init__(self, model: Model, max_num_batched_tokens: int) -> None:
        super().__init__(BLOCK_SIZE, max_num_batched_tokens, lambda *_: (0, False))
        self._model = model

    def _sample(self, handle: int, resident: Resident) -> tuple[int, EndFlag | None]:
        drawn = self._model.draw(tuple(resident.tokens))
        self.draw = lambda *_: drawn
        return super()._sample(handle, resident)


class ModelExecutor:
    """What a worker process executes plans with."""

    def __init__(self, model: Model, max_num_batched_tokens: int) -> None:
        self._model = model
        self._max_num_batched_tokens = max_num_batched_tokens
        self.reset()

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._worker.execute(plan)
        rows = zip(result.handles.tolist(), result.tokens.tolist(), strict=True)
        scores = tuple(
            TokenLogprobs(row, self._model.logprob(token), _NO_IDS, _NO_LOGPROBS)
            for row, (handle, token) in enumerate(rows)
            if self._worker.residents[handle].admission.sampling.num_logprobs is not None
        )
        return replace(result, logprobs=scores) if scores else result

    def reset(self) -> None:
        self._worker = _Worker(self._model, self._max_num_batched_tokens)
