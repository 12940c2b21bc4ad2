"""The timeline of a request: events in their order, and what the logs do not show any more."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shared.messages.requests import Submit


class Kind(StrEnum):
    """What happened."""

    SUBMITTED = "submitted"
    ACCEPTED = "accepted"
    SEEN = "seen"  # the logs begin after its acceptance
    ADMITTED = "admitted"
    FIRST_TOKEN = "first token"
    PREEMPTED = "preempted"
    ADMITTED_AGAIN = "admitted again"
    RESUMED = "resumed"  # a token after it was admitted again
    ATTACH = "attach"  # what the gateway asks for
    MOVED = "moved"  # what becomes of it
    REWOUND = "rewound"
    EPOCH = "new epoch"
    TAKEN_OVER = "taken over"
    LOST_SIGHT = "lost sight"
    STOP = "stop"
    CHOICE_ENDED = "choice ended"
    ABORT = "abort"
    GATEWAY_LOST = "gateway lost"
    DRAINING = "draining"
    ENDED = "ended"
    TOLD_AGAIN = "told again"


@dataclass(frozen=True, slots=True)
class When:
    """A moment, on the wall clock of the process that wrote it down."""

    at_ms: int
    is_estimate: bool = False  # not before this, as far as the logs show


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a request.

    Attributes:
        text: to be read; never holds prompts or tokens, only how many they are.
        facts: the same for programs.
    """

    kind: Kind
    when: When
    text: str
    facts: Mapping[str, Any]


@dataclass(slots=True)
class Timeline:
    """A request's life.

    Attributes:
        status: where the request stands at the end of the logs.
        unknown: what the logs do not show, or not any more.
    """

    request_id: str
    events: list[Event] = field(default_factory=list)
    status: str = ""
    unknown: list[str] = field(default_factory=list)

    def add(self, kind: Kind, when: When, text: str, **facts: Any) -> None:
        """Add an event behind the last one."""
        self.events.append(Event(kind, when, text, facts))

    def note_unknown(self, what: str) -> None:
        """Note once what is not known."""
        if what not in self.unknown:
            self.unknown.append(what)


def counted(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: list[str], limit: int = 4) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def asked_for(submit: Submit) -> str:
    """The size of a request in words."""
    num_prompt = submit.num_prompt_tokens
    parts = [counted(num_prompt, "prompt token")] if num_prompt else []
    parts.append(f"up to {submit.sampling.max_tokens} to generate")
    if submit.sampling.beams is not None:
        parts.append(f"beam search of width {submit.sampling.beams.width}")
    elif submit.num_choices > 1:
        parts.append(counted(submit.num_choices, "choice"))
    if submit.priority:
        parts.append(f"priority {submit.priority}")
    if submit.deadline_ms:
        parts.append(f"deadline {(submit.deadline_ms - submit.received_ms) / 1e3:.3f} s")
    if submit.trace_id:
        parts.append(f"trace {submit.trace_id}")
    return ", ".join(parts)


def size_of(submit: Submit) -> dict[str, object]:
    """The same for programs."""
    beams = submit.sampling.beams
    return {
        "gateway": submit.gateway,
        "attachment": submit.attachment,
        "num_prompt_tokens": submit.num_prompt_tokens or None,
        "max_tokens": submit.sampling.max_tokens,
        "num_choices": submit.num_choices,
        "num_beams": 0 if beams is None else beams.width,
        "priority": submit.priority,
        "deadline_ms": submit.deadline_ms,
        "trace_id": submit.trace_id,
    }
