"""Plans by hand: a scheduler without a policy, for tests of the worker."""

from dataclasses import dataclass, field, replace

import numpy as np

from gpu_worker.executor import Executor
from shared.messages import Admission, StepPlan, StepResult
from shared.sampling import SamplingParams

GREEDY = SamplingParams(
    max_tokens=64,
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


def sampling(**changes: object) -> SamplingParams:
    """Greedy, with changes."""
    return replace(GREEDY, **changes)  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def step_plan(step: int, **fields: object) -> StepPlan:
    """A plan that does nothing but what is said."""
    values: dict[str, object] = {
        "now_ms": 0,
        "requests_cursor": "0-0",
        "outputs_cursor": "0-0",
        "outputs_min_id": "0-0",
        "retired": ints(),
        "admissions": (),
        "grown_handles": ints(),
        "grown_blocks": ints(),
        "chunk_handles": ints(),
        "chunk_tokens": ints(),
    }
    return StepPlan(step=step, **{**values, **fields})  # type: ignore[arg-type]


@dataclass(slots=True)
class Known:
    """What the planner remembers of a sequence."""

    num_tokens: int
    num_computed: int
    blocks: list[int]
    decodes: bool = False
    output: list[int] = field(default_factory=list)
    ended: int = 0


class Planner:
    """Drives an executor; hands out blocks in random order."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self.known: dict[int, Known] = {}
        self.results: list[StepResult] = []
        kv = executor.limits.kv
        self._block_size = kv.block_size
        self._free = np.random.default_rng(seed).permutation(kv.num_blocks).tolist()
        self._step = 0
        self._admissions: list[Admission] = []
        self._retired: list[int] = []

    def admit(
        self,
        handle: int,
        tokens: list[int],
        params: SamplingParams = GREEDY,
        num_prompt_tokens: int | None = None,
        choice: int = 0,
    ) -> None:
        """Part of the next plan."""
        blocks = [self._free.pop() for _ in range(-(-len(tokens) // self._block_size))]
        self.known[handle] = Known(len(tokens), 0, blocks)
        self._admissions.append(
            Admission(
                handle=handle,
                choice=choice,
                tokens=np.array(tokens, np.int32),
                num_prompt_tokens=num_prompt_tokens or len(tokens),
                num_computed=0,
                block_table=np.array(blocks, np.int32),
                sampling=params,
            )
        )

    def retire(self, handle: int) -> Known:
        """Part of the next plan; the blocks are free at once."""
        gone = self.known.pop(handle)
        self._free = gone.blocks + self._free
        self._retired.append(handle)
        return gone

    def step(self, **chunks: int) -> StepResult:
        """Execute the next plan; chunks as ``s<handle>=<tokens>``."""
        sizes = {int(name[1:]): size for name, size in chunks.items()}
        grown: list[tuple[int, int]] = []
        for handle, seq in self.known.items():
            if seq.decodes and not seq.ended:
                seq.num_computed += 1
                if seq.num_computed > len(seq.blocks) * self._block_size:
                    seq.blocks.append(self._free.pop())
                    grown.append((handle, seq.blocks[-1]))
        self._step += 1
        plan = step_plan(
            self._step,
            retired=ints(*self._retired),
            admissions=tuple(self._admissions),
            grown_handles=ints(*(handle for handle, _ in grown)),
            grown_blocks=ints(*(block for _, block in grown)),
            chunk_handles=ints(*sizes),
            chunk_tokens=ints(*sizes.values()),
        )
        self._admissions, self._retired = [], []
        for handle, size in sizes.items():
            seq = self.known[handle]
            seq.num_computed += size
            seq.decodes = seq.num_computed == seq.num_tokens
        return self._note(self.executor.execute(plan))

    def _note(self, result: StepResult) -> StepResult:
        for handle, token in zip(result.handles.tolist(), result.tokens.tolist(), strict=True):
            self.known[handle].output.append(token)
            self.known[handle].num_tokens += 1
        for row, flag in zip(result.ended_rows.tolist(), result.ended_flags.tolist(), strict=True):
            self.known[int(result.handles[row])].ended = flag
        self.results.append(result)
        return result

    def run(self, handle: int, num_tokens: int) -> list[int]:
        """Decode until a sequence has that many new tokens, or has ended."""
        while len(self.known[handle].output) < num_tokens and not self.known[handle].ended:
            self.step()
        return self.known[handle].output
