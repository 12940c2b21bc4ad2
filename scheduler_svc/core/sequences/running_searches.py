"""Beam searches of running groups: applies results to their sequences.

A search waits for its results: its next plan lists the beams that continue, the new ones, and the
parents of these. Between two rounds beams fork and are freed like processes (PagedAttention,
section 4.4); the next plan copies only blocks that are written.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

from scheduler_svc.core.blocks.block_tables import BlockTables
from scheduler_svc.core.config import ProtocolError
from scheduler_svc.core.sequences.beam_search import BeamRound
from scheduler_svc.core.sequences.sequence import (
    ENDED,
    NO_TOKENS,
    SEARCHING,
    Sequence,
    SequenceGroup,
)
from shared.messages.outputs import BeamCandidates


class RunningSearches:
    """Running groups with a beam search, by the step whose result they need.

    Args:
        tables: of all groups.
        new_handle: gives every new beam its handle.
    """

    def __init__(self, tables: BlockTables, new_handle: Callable[[], int]) -> None:
        self._tables = tables
        self._new_handle = new_handle
        self._awaited: defaultdict[int, list[SequenceGroup]] = defaultdict(list)
        self._due: list[SequenceGroup] = []

    def planned(self, group: SequenceGroup, step: int) -> None:
        """Wait for the result of this step, which computes the beams' last tokens."""
        group.awaited_step = step
        group.parents = []
        self._awaited[step].append(group)

    def take_due(self) -> list[SequenceGroup]:
        """Groups whose beams have new last tokens, for the next plan."""
        due, self._due = self._due, []
        # A group may have ended since its result was applied.
        return [group for group in due if group.state is SEARCHING]

    def apply(self, step: int, beams: Iterable[BeamCandidates]) -> list[SequenceGroup]:
        """Advance all searches that wait for this step; return those that are done.

        Raises:
            ProtocolError: candidates of a search are missing or impossible.
        """
        done: list[SequenceGroup] = []
        groups = self._awaited.pop(step, None)
        if groups is None:
            return done
        candidates = {found.group: found for found in beams}
        for group in groups:
            if group.state is ENDED:
                continue
            if group.handle not in candidates:
                raise ProtocolError(
                    f"result of step {step}: nothing about beam search {group.handle}"
                )
            group.awaited_step = 0
            if self._advance(group, candidates[group.handle]):
                done.append(group)
            elif group.state is SEARCHING:
                self._due.append(group)
        return done

    def _advance(self, group: SequenceGroup, candidates: BeamCandidates) -> bool:
        """Advance a search by one round; whether it was the last."""
        search = group.search
        assert search is not None, f"{group.request_id} has no beams"
        before, num_computed = search.running, group.num_prompt_tokens + search.length
        round_ = search.advance(candidates)
        for index in set(round_.finished):
            # A request that continues this answer finds its blocks.
            sequence = group.sequences[index]
            sequence.output = before[index].tokens()
            self._tables.register_computed(group, sequence, num_computed)
        if not search.done:
            self._replace_beams(group, round_)
        return search.done

    def _replace_beams(self, group: SequenceGroup, round_: BeamRound) -> None:
        """Continue, fork and free sequences as the beams did."""
        old = group.sequences
        free = set(range(len(old)))
        sequences = []
        for index in round_.parents:
            parent = old[index]
            if index in free:
                free.remove(index)
                sequences.append(parent)
                continue
            child = Sequence(choice=0, handle=self._new_handle(), output=NO_TOKENS)
            self._tables.fork(parent, child)
            sequences.append(child)
        for index in free:
            self._tables.release(old[index])
            self._tables.release_swapped(old[index])
        group.sequences = sequences
        if group.state is SEARCHING:
            group.parents = [old[index].handle for index in round_.parents]
            group.num_tokens += 1
