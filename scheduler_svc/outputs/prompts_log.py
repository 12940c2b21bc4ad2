"""Prompts in a log of their own, so that the readers of ``outputs`` do not read them all.

The core makes RequestStates with prompts. What is appended to ``outputs`` has a digest instead, and
the id of the entry of ``prompts`` that has the prompt; one transaction appends both. An entry of
``prompts`` is kept as long as the entry of ``outputs`` that refers to it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shared.bus.api import START, Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import IntArray, Message, encode
from shared.messages.outputs import RequestState
from shared.messages.prompts import Prompt, decode_prompts, with_prompt

_PAGE = 1_000  # entries per read
_MOST_ASKED = 1_000


@dataclass(frozen=True, slots=True)
class Reference:
    """An entry of ``outputs``, and the entry of ``prompts`` to which its states refer."""

    outputs_id: EntryId
    prompts_id: EntryId


class PromptsLog:
    """Writes the prompts of one epoch.

    Args:
        keys: of the engine.
        epoch: whose number begins the ids of entries.
        earlier: references of earlier epochs, in the order of ``outputs``.
    """

    def __init__(self, keys: EngineKeys, epoch: int, earlier: Iterable[Reference] = ()) -> None:
        self._keys = keys
        self._epoch = epoch
        self._last = 0  # entry of this epoch
        self._written: EntryId | None = None  # by the last ``split``
        self._references = deque(earlier)
        self._asked: set[str] = set()

    @property
    def last_id(self) -> EntryId:
        """The last entry."""
        return EntryId(self._epoch, self._last)

    @property
    def first_needed_id(self) -> EntryId:
        """Entries below are referred to by no entry of ``outputs``."""
        return self._references[0].prompts_id if self._references else self.last_id

    def leave_in(self, request_id: str) -> None:
        """Leave the prompt in the next state of a request, for a gateway of an older version."""
        if len(self._asked) < _MOST_ASKED:
            self._asked.add(request_id)

    def split(
        self,
        messages: Sequence[Message],
        trim_below: EntryId | None = None,
        seq: int | None = None,
    ) -> list[Append]:
        """The append of messages to ``outputs``, behind that of their prompts if they have any.

        Args:
            trim_below: entries of ``outputs`` that are not needed.
            seq: as in Append.
        """
        self._written = None
        at = EntryId(self._epoch, self._last + 1)
        prompts, shown = list[bytes](), list[bytes]()
        for message in messages:
            if isinstance(message, RequestState) and self._moves(message):
                submit = message.submit
                prompts.append(encode(Prompt(submit.request_id, submit.prompt)))
                message = replace(message, submit=submit.without_prompt(), prompt_at=str(at))
            shown.append(encode(message))
        outputs = Append(self._keys.outputs, shown, self._epoch, seq, trim_below)
        if not prompts:
            return [outputs]
        self.trim(trim_below or START)
        self._last, self._written = at.seq, at
        return [
            Append(self._keys.prompts, prompts, self._epoch, at.seq, self._first_to_keep(at)),
            outputs,
        ]

    def appended(self, outputs_id: EntryId) -> None:
        """The appends of the last ``split`` were executed, and this is the entry of ``outputs``."""
        if self._written is not None:
            self._references.append(Reference(outputs_id, self._written))

    def trim(self, outputs_below: EntryId) -> None:
        """Forget references from entries of ``outputs`` that are not needed."""
        references = self._references
        while references and references[0].outputs_id < outputs_below:
            references.popleft()

    def _first_to_keep(self, at: EntryId) -> EntryId:
        return self._references[0].prompts_id if self._references else at

    def _moves(self, state: RequestState) -> bool:
        if state.submit.lacks_prompt:
            return False
        if state.submit.request_id in self._asked:
            self._asked.remove(state.submit.request_id)
            return False
        return True


@dataclass(frozen=True, slots=True)
class StoredPrompts:
    """The prompts log as earlier epochs left it.

    Attributes:
        by_entry: prompts [num_tokens] by request, by the id of their entry.
    """

    by_entry: dict[str, dict[str, IntArray]] = field(default_factory=dict)

    def restore(self, state: RequestState) -> RequestState:
        """The state with the prompt that it refers to, if that is there."""
        prompts = self.by_entry.get(state.prompt_at)
        if prompts is None:
            return state
        return with_prompt(state, prompts.get(state.submit.request_id)) or state


async def read_prompts(bus: Bus, log: str, fence: EntryId, vocab_size: int = 0) -> StoredPrompts:
    """All that is in front of an epoch's fence."""
    found, cursor = StoredPrompts(), START
    while cursor < fence:
        entries = (await bus.read({log: cursor}, 0, _PAGE)).get(log, [])
        if not entries:
            break
        for entry in entries:
            if entry.id < fence:
                found.by_entry[str(entry.id)] = decode_prompts(entry.messages, vocab_size)
        cursor = entries[-1].id
    return found
