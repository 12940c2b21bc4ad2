"""Plans by hand: a scheduler without a policy, for tests of the worker."""

from dataclasses import dataclass, field, replace

import numpy as np

from gpu_worker.step.executor import Executor
from shared.messages.outputs import StepResult
from shared.messages.plans import Admission, BeamStep, StepPlan
from shared.sampling import SamplingParams

GREEDY = SamplingParams.greedy(64)


def sampling(**changes: object) -> SamplingParams:
    """Greedy sampling, with changes."""
    return replace(GREEDY, **changes)  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


_ARRAYS = (
    "retired",
    "swap_out_device",
    "swap_out_host",
    "swap_in_host",
    "swap_in_device",
    "copy_sources",
    "copy_targets",
    "replaced_handles",
    "replaced_columns",
    "fork_parents",
    "fork_children",
    "fork_choices",
    "grown_handles",
    "grown_blocks",
    "chunk_handles",
    "chunk_tokens",
)


def step_plan(step: int, **fields: object) -> StepPlan:
    """A plan that has only the given changes."""
    values: dict[str, object] = {
        "now_ms": 0,
        "requests_cursor": "0-0",
        "outputs_cursor": "0-0",
        "outputs_min_id": "0-0",
        "admissions": (),
        "beams": (),
        **{name: ints() for name in _ARRAYS},
    }
    return StepPlan(step=step, **{**values, **fields})  # type: ignore[arg-type]


@dataclass(slots=True)
class Known:
    """The planner's record of a sequence."""

    num_tokens: int
    num_computed: int
    blocks: list[int]
    is_beam: bool = False
    decodes: bool = False
    output: list[int] = field(default_factory=list)
    ended: int = 0


class Planner:
    """Drives an executor; allocates blocks in random order, and copies shared ones on write."""

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
        self._forks: list[tuple[int, int, int]] = []
        self._beams: list[BeamStep] = []
        self._continued: set[int] = set()

    def admit(
        self,
        handle: int,
        tokens: list[int],
        params: SamplingParams = GREEDY,
        num_prompt_tokens: int | None = None,
        choice: int = 0,
        like: int | None = None,
        num_computed: int = 0,
        grammar_of: int = 0,
    ) -> None:
        """Admit in the next plan; the first ``num_computed`` tokens are in blocks of ``like``."""
        blocks = [] if like is None else self.known[like].blocks[: num_computed // self._block_size]
        num_more = -(-len(tokens) // self._block_size) - len(blocks)
        blocks += [self._free.pop() for _ in range(num_more)]
        self.known[handle] = Known(len(tokens), num_computed, blocks, params.beams is not None)
        self._admissions.append(
            Admission(
                handle=handle,
                choice=choice,
                tokens=np.array(tokens, np.int32),
                num_prompt_tokens=num_prompt_tokens or len(tokens),
                num_computed=num_computed,
                block_table=np.array(blocks, np.int32),
                sampling=params,
                grammar_of=grammar_of,
            )
        )

    def retire(self, handle: int) -> Known:
        """Retire in the next plan; the blocks are free at once."""
        gone = self.known.pop(handle)
        self._free = [block for block in gone.blocks if not self._num_owners(block)] + self._free
        self._retired.append(handle)
        return gone

    def fork(self, parent: int, child: int, choice: int) -> None:
        """Fork in the next plan, in which the parent has to sample."""
        self._forks.append((parent, child, choice))

    def beams(
        self,
        group: int,
        handles: list[int],
        scores: list[float],
        parents: tuple[int, ...] = (),
        tokens: tuple[int, ...] = (),
    ) -> None:
        """Run beams in the next plan; beams with parents get a chunk of one token automatically."""
        self._beams.append(
            BeamStep(
                group, ints(*handles), np.array(scores, np.float32), ints(*parents), ints(*tokens)
            )
        )
        before = {parent: self.known[parent] for parent in parents}
        for handle, parent in zip(handles, parents, strict=bool(parents)):
            old = before[parent]
            if handle != parent:
                self.known[handle] = replace(old, blocks=list(old.blocks))
        for handle in handles if parents else ():
            self.known[handle].num_tokens += 1
            self._continued.add(handle)

    def _num_owners(self, block: int) -> int:
        return sum(block in seq.blocks for seq in self.known.values())

    def step(self, **chunks: int) -> StepResult:
        """Execute the next plan; chunks as ``s<handle>=<tokens>``."""
        sizes = {int(name[1:]): size for name, size in chunks.items()}
        grown: list[tuple[int, int]] = []
        copies: list[tuple[int, int, int, int]] = []  # source, target, handle, column
        for handle, seq in self.known.items():
            if (seq.decodes and not seq.ended) or handle in self._continued:
                column = seq.num_computed // self._block_size
                seq.num_computed += 1
                if column == len(seq.blocks):
                    seq.blocks.append(self._free.pop())
                    grown.append((handle, seq.blocks[column]))
                elif self._num_owners(source := seq.blocks[column]) > 1:
                    seq.blocks[column] = self._free.pop()
                    copies.append((source, seq.blocks[column], handle, column))
        self._step += 1
        plan = step_plan(
            self._step,
            retired=ints(*self._retired),
            beams=tuple(self._beams),
            copy_sources=ints(*(source for source, *_ in copies)),
            copy_targets=ints(*(target for _, target, *_ in copies)),
            replaced_handles=ints(*(handle for *_, handle, _ in copies)),
            replaced_columns=ints(*(column for *_, column in copies)),
            admissions=tuple(self._admissions),
            fork_parents=ints(*(parent for parent, _, _ in self._forks)),
            fork_children=ints(*(child for _, child, _ in self._forks)),
            fork_choices=ints(*(choice for *_, choice in self._forks)),
            grown_handles=ints(*(handle for handle, _ in grown)),
            grown_blocks=ints(*(block for _, block in grown)),
            chunk_handles=ints(*sizes, *self._continued),
            chunk_tokens=ints(*sizes.values(), *[1] * len(self._continued)),
        )
        for handle, size in sizes.items():
            seq = self.known[handle]
            seq.num_computed += size
            seq.decodes = seq.num_computed == seq.num_tokens and not seq.is_beam
        for parent, child, _ in self._forks:
            old = self.known[parent]
            self.known[child] = Known(
                old.num_tokens, old.num_computed, list(old.blocks), decodes=True
            )
        self._admissions, self._retired, self._forks = [], [], []
        self._beams, self._continued = [], set()
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
