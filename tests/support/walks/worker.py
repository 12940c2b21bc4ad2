"""A fast worker without a model, for millions of steps: it executes plans strictly.

Each slot of the pool holds a tag of all the tokens that led to it. So a block that is shared,
overwritten, copied, swapped or found wrongly is detected in the step that reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.messages.outputs import BeamCandidates, StepResult
from shared.messages.plans import Admission, BeamStep, StepPlan
from tests.support.walks.beams import tag_after
from tests.support.walks.clients import Client

_NOTHING = -1  # a slot's tag before anything is written
_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class Resident:
    """The state of a resident sequence."""

    client: Client
    choice: int
    tokens: list[int]  # prompt and output
    table: list[int]
    num_computed: int
    tags: npt.NDArray[np.int64]  # [max_model_len] by position, those of ``tokens``
    decodes: bool = False
    ended: bool = False

    def append(self, token: int) -> None:
        """Append a token and its tag."""
        at = len(self.tokens)
        before = int(self.tags[at - 1]) if at else self.client.first_tag
        self.tags[at] = tag_after(before, token)
        self.tokens.append(token)

    def branch(self, choice: int) -> "Resident":
        """A new sequence that equals this one."""
        return Resident(
            self.client,
            choice,
            list(self.tokens),
            list(self.table),
            self.num_computed,
            self.tags.copy(),
            self.decodes,
        )


class WalkWorker:
    """Executes plans strictly in order.

    Args:
        clients: in the order of their numbers, which are the seeds of their sampling, from 1.
        prefixes: clients of requests that compute pinned prefixes, by their tokens.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        prefixes: Mapping[bytes, Client],
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.residents: dict[int, Resident] = {}
        self._clients = clients
        self._prefixes = prefixes
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._pool = np.full((num_blocks, block_size), _NOTHING, np.int64)
        self._host: dict[int, npt.NDArray[np.int64]] = {}
        self._num_owners = [0] * num_blocks  # tables of residents with each block
        self._to_check: set[int] = set()  # handles whose blocks were filled, or written by others
        self._step = 0

    def execute(self, plan: StepPlan, tables: Mapping[int, Sequence[int]]) -> StepResult:
        """Execute one step.

        Args:
            tables: block tables by handle, as the scheduler had them when it made the plan.
        """
        assert plan.step == self._step + 1, f"step {plan.step} behind {self._step}"
        self._step = plan.step
        self._apply(plan)
        chunks = self._chunks(plan)
        num_batched = sum(chunks.values())
        # There are no rows if everything planned has ended in a step that was still in flight.
        assert num_batched <= self._max_num_batched_tokens, f"{num_batched} tokens in a step"
        self._write(chunks)
        sampled = self._sampling(chunks)
        self._fork(plan, sampled)
        known = {handle: found.table for handle, found in self.residents.items()}
        assert known == tables, f"step {plan.step}: tables {known}, the scheduler's are {tables}"
        # Only these can have changed; a full check now and then makes sure. Admitted sequences may
        # share blocks that are still to be computed: they are checked once they read.
        is_thorough = plan.step % 16 == 0
        for handle in chunks if is_thorough else self._to_check & chunks.keys():
            self._check(handle)
        self._to_check -= chunks.keys()
        beams = tuple(self._candidates(beam) for beam in plan.beams)
        return self._result(plan, sampled, beams, num_batched)

    # ------------------------------------------------------------------ the plan

    def _apply(self, plan: StepPlan) -> None:
        for handle in plan.retired.tolist():
            self._to_check.discard(handle)
            for block in self.residents.pop(handle).table:
                self._num_owners[block] -= 1
        for beam in plan.beams:
            self._branch(beam)
        if len(plan.swap_out_device) or len(plan.swap_in_device):
            self._swap(plan)
        if len(plan.copy_sources):
            self._copy(plan)
        for admission in plan.admissions:
            self._add(admission.handle, self._admitted(admission))
        for handle, block in zip(
            plan.grown_handles.tolist(), plan.grown_blocks.tolist(), strict=True
        ):
            self.residents[handle].table.append(block)
            self._num_owners[block] += 1
            self._check_length(self.residents[handle])

    def _check_length(self, resident: Resident) -> None:
        """Check that the last token, which is sampled but never computed, got no block."""
        client = resident.client
        most = len(client.submit.prompt) + client.max_output - 1
        assert (len(resident.table) - 1) * self._block_size < most, f"blocks behind {most} tokens"

    def _add(self, handle: int, resident: Resident) -> None:
        assert handle not in self.residents, f"{handle} comes twice"
        self.residents[handle] = resident
        self._to_check.add(handle)
        self._check_length(resident)
        for block in resident.table:
            self._num_owners[block] += 1

    def _branch(self, beam: BeamStep) -> None:
        """First make all new beams from their parents, then append to all."""
        handles, parents = beam.handles.tolist(), beam.parents.tolist()
        if not parents:
            assert len(beam.tokens) == 0, "beams that continue nothing grow by nothing"
            return
        for handle, parent in zip(handles, parents, strict=True):
            if handle != parent:
                self._add(handle, self.residents[parent].branch(choice=0))
        for handle, token in zip(handles, beam.tokens.tolist(), strict=True):
            self.residents[handle].append(token)

    def _swap(self, plan: StepPlan) -> None:
        out_host, in_device = plan.swap_out_host.tolist(), plan.swap_in_device.tolist()
        in_host, sources = plan.swap_in_host.tolist(), plan.copy_sources.tolist()
        assert len(set(out_host)) == len(out_host), "a host block is filled twice"
        assert len(set(in_device)) == len(in_device), "a block is filled twice"
        # A block may go out and come back at once, but must not replace one that is still to come
        # back: ``_check`` checks all that is swapped in.
        assert not set(in_device) & {*sources, *plan.copy_targets.tolist()}
        for device, host in zip(plan.swap_out_device.tolist(), out_host, strict=True):
            self._host[host] = self._pool[device].copy()
        for host, device in zip(in_host, in_device, strict=True):
            self._pool[device] = self._host[host]
        for host in set(in_host):
            del self._host[host]  # a block that comes back is not needed there any more

    def _copy(self, plan: StepPlan) -> None:
        sources, targets = plan.copy_sources.tolist(), plan.copy_targets.tolist()
        assert not set(sources) & set(targets), "copies depend on their order"
        assert len(set(targets)) == len(targets), "a block is copied to twice"
        self._pool[targets] = self._pool[sources]
        for handle, column, target in zip(
            plan.replaced_handles.tolist(), plan.replaced_columns.tolist(), targets, strict=True
        ):
            table = self.residents[handle].table
            self._num_owners[table[column]] -= 1
            self._num_owners[target] += 1
            table[column] = target
            self._to_check.add(handle)

    def _admitted(self, new: Admission) -> Resident:
        assert new.num_computed < len(new.tokens), f"{new.handle} has nothing to compute"
        client = self._client_of(new)
        tags = np.empty(self._max_model_len + 1, np.int64)
        table = new.block_table.tolist()
        found = Resident(client, new.choice, [], table, new.num_computed, tags)
        for token in new.tokens.tolist():
            found.append(token)
        return found

    def _client_of(self, new: Admission) -> Client:
        """Only requests that compute pinned prefixes have the seed 0."""
        if new.sampling.seed == 0:
            return self._prefixes[new.tokens.tobytes()]
        return self._clients[new.sampling.seed - 1]

    def _chunks(self, plan: StepPlan) -> dict[int, int]:
        """Tokens that the step computes, by handle."""
        chunks = dict(zip(plan.chunk_handles.tolist(), plan.chunk_tokens.tolist(), strict=True))
        assert len(chunks) == len(plan.chunk_handles), "a sequence has two chunks"
        for handle, resident in self.residents.items():
            if resident.decodes and not resident.ended:
                assert handle not in chunks, f"{handle} decodes and is named"
                chunks[handle] = 1
        return chunks

    # ------------------------------------------------------------------ the step

    def _write(self, chunks: Mapping[int, int]) -> None:
        size = self._block_size
        shared: set[int] = set()
        for handle, count in chunks.items():
            resident = self.residents[handle]
            first = resident.num_computed
            assert 1 <= count <= len(resident.tokens) - first, f"{count} tokens of {handle}"
            for position in range(first, first + count):
                block = resident.table[position // size]
                self._pool[block, position % size] = resident.tags[position]
                if self._num_owners[block] != 1:
                    assert not resident.decodes, f"{handle} writes the shared block {block}"
                    shared.add(block)
            resident.num_computed += count
        if shared:
            self._to_check.update(
                handle
                for handle, resident in self.residents.items()
                if not shared.isdisjoint(resident.table)
            )

    def _sampling(self, chunks: Mapping[int, int]) -> list[int]:
        """Handles of sequences that sample a token."""
        sampled = []
        for handle in chunks:
            resident = self.residents[handle]
            if resident.num_computed == len(resident.tokens) and resident.client.search is None:
                resident.decodes = True
                sampled.append(handle)
        return sampled

    def _fork(self, plan: StepPlan, sampled: list[int]) -> None:
        for parent, child, choice in zip(
            plan.fork_parents.tolist(),
            plan.fork_children.tolist(),
            plan.fork_choices.tolist(),
            strict=True,
        ):
            assert parent in sampled, "a fork samples with its parent"
            assert choice != self.residents[parent].choice, f"two choices {choice}"
            self._add(child, self.residents[parent].branch(choice))
            sampled.append(child)

    def _check(self, handle: int) -> None:
        """Check that everything computed of a sequence is still there."""
        resident = self.residents[handle]
        count = resident.num_computed
        stored = self._pool[resident.table].ravel()[:count]
        wrong = stored != resident.tags[:count]
        if wrong.any():
            first = int(wrong.argmax())
            raise AssertionError(
                f"step {self._step}: {handle} of {resident.client.submit.request_id} reads "
                f"something else at {first} of {count}"
            )

    # ---------------------------------------------------------------- the result

    def _candidates(self, beam: BeamStep) -> BeamCandidates:
        """The best continuations of all beams together."""
        residents = [self.residents[handle] for handle in beam.handles.tolist()]
        client = residents[0].client
        assert client.search is not None, f"{client.submit.request_id} has no beams"
        assert len(beam.scores) == len(residents) <= client.search.params.width
        lengths = {len(resident.tokens) for resident in residents}
        assert len(lengths) == 1, f"beams of {client.submit.request_id} have {lengths} tokens"
        [length] = lengths
        beams = []
        for resident, score in zip(residents, beam.scores.tolist(), strict=True):
            assert resident.client is client, "beams of two requests in a group"
            assert resident.num_computed == length, "a beam is not computed"
            beams.append((int(resident.tags[length - 1]), score))
        found = client.search.ranked(beams, length - len(client.submit.prompt))
        return BeamCandidates(
            group=beam.group,
            parents=np.array([index for _, index, _, _ in found], np.int32),
            tokens=np.array([token for _, _, token, _ in found], np.int32),
            scores=np.array([score for score, _, _, _ in found], np.float32),
            flags=np.array([flag for _, _, _, flag in found], np.int32),
        )

    def _result(
        self,
        plan: StepPlan,
        sampled: list[int],
        beams: tuple[BeamCandidates, ...],
        num_batched: int,
    ) -> StepResult:
        tokens: list[int] = []
        rows: list[int] = []
        flags: list[int] = []
        for row, handle in enumerate(sampled):
            resident = self.residents[handle]
            token, flag = resident.client.draw(resident.choice, len(resident.tokens))
            resident.append(token)
            tokens.append(token)
            if flag is not None:
                resident.ended = True
                rows.append(row)
                flags.append(flag)
        return StepResult(
            step=plan.step,
            handles=np.array(sampled, np.int32),
            tokens=np.array(tokens, np.int32),
            ended_rows=np.array(rows, np.int32),
            ended_flags=np.array(flags, np.int32),
            beams=beams,
            logprobs=(),
            prompt_logprobs=(),
            admitted_handles=_NONE,  # for metrics, which are not checked here
            admitted_computed=_NONE,
            num_batched_tokens=num_batched,
            model_us=0,
            step_us=0,
        )
