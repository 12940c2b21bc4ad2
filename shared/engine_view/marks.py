"""Marks on the time line of an engine: preemptions, new epochs, requests that return or end."""

from dataclasses import dataclass
from enum import StrEnum

from shared.messages.plans import EpochStarted, PlannedPreemption


class MarkKind(StrEnum):
    """What happened."""

    EPOCH = "epoch"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    READMITTED = "readmitted"
    RECOVERED = "recovered"
    ENDED = "ended"
    LOST_SIGHT = "lost sight"


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that happened.

    Attributes:
        number: of the request; 0: it concerns none, or all.
        text: names requests by their numbers.
    """

    kind: MarkKind
    at_ms: int
    step: int
    number: int
    text: str

    def row(self) -> list[int | str]:
        """The same as an array."""
        return [self.kind.value, self.at_ms, self.step, self.number, self.text]


def words_of_preemption(found: PlannedPreemption, victim: str, by: str) -> str:
    """Why a request lost its blocks, as the policy decided.

    Args:
        victim: what to call the request.
        by: what to call the one that needed the blocks.
    """
    had = f"{found.num_blocks} blocks with {found.num_tokens} tokens"
    if found.is_displaced:
        why = f"{by} of a key with nothing running waited, and the key of {victim} runs most"
    elif found.by == found.request_id:
        why = (
            f"it needed a block itself, {found.num_free_blocks} were free, and none ranks below it"
        )
    else:
        why = (
            f"{by} needed a block, {found.num_free_blocks} were free, and {victim} "
            "is the last running request by rank"
        )
    if found.kind == "swap":
        how = f"the host pool keeps its blocks ({found.num_free_host_blocks} were free there)"
    elif found.num_free_host_blocks < found.num_blocks:
        how = (
            f"they are recomputed: the host pool has {found.num_free_host_blocks} free blocks, "
            "too few to swap"
        )
    else:
        how = "they are recomputed, which was wanted or costs less than two copies"
    return f"lost {had}: {why}; {how}"


def words_of_epoch(before: EpochStarted | None, now: EpochStarted) -> str:
    """Which services are others than before."""
    changed = []
    if before is not None:
        if before.scheduler != now.scheduler:
            changed.append("another scheduler")
        if before.workers != now.workers:
            changed.append("another worker" if len(now.workers) == 1 else "other workers")
    return f"epoch {now.epoch}: {' and '.join(changed) or 'a new start'}"
