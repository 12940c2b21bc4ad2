"""Everybody in the outputs log: who waits, who runs, and whose a handle is."""

from dataclasses import dataclass

from shared.codec import IntArray
from shared.messages.outputs import RequestState, StepResult


@dataclass(slots=True)
class _Member:
    priority: int
    handles: dict[int, int]  # by choice that has not ended
    is_running: bool = False


class Crowd:
    """Unfinished requests in the order of their acceptance."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._by_handle: dict[int, str] = {}

    def new_epoch(self) -> None:
        """Whoever is unfinished will be named again."""
        self._members.clear()
        self._by_handle.clear()

    def stated(self, state: RequestState) -> None:
        """A request is accepted, taken over, or said once more."""
        request_id = state.submit.request_id
        handles = {c.choice: c.handle for c in state.choices if not c.finish_reason}
        known = self._members.get(request_id)
        if known is not None and known.handles == handles:
            return
        self.ended(request_id)
        if handles and all(handles.values()):
            self._members[request_id] = _Member(state.submit.priority, handles)
            self._by_handle.update(dict.fromkeys(handles.values(), request_id))

    def computed(self, result: StepResult) -> None:
        """A step admitted some, and some have ended."""
        for handle in result.admitted_handles.tolist():
            if (request_id := self._by_handle.get(handle)) is not None:
                self._members[request_id].is_running = True
        for handle in result.handles[result.ended_rows].tolist():
            if (request_id := self._by_handle.pop(handle, None)) is not None:
                self._end_handle(request_id, handle)

    def choice_ended(self, request_id: str, choice: int) -> None:
        """One of several choices is over."""
        member = self._members.get(request_id)
        if member is not None and choice in member.handles:
            handle = member.handles[choice]
            self._by_handle.pop(handle, None)
            self._end_handle(request_id, handle)

    def ended(self, request_id: str) -> None:
        """A request is over."""
        member = self._members.pop(request_id, None)
        if member is not None:
            for handle in member.handles.values():
                self._by_handle.pop(handle, None)

    def owners(self, handles: IntArray, unknown: str | None = None) -> set[str]:
        """Whose sequences these are; ``unknown`` stands for whoever is not known by them."""
        found = {self._by_handle.get(handle, unknown) for handle in handles.tolist()}
        return {owner for owner in found if owner is not None}

    def ahead_of(self, request_id: str) -> list[str]:
        """Who waits and is served before this one."""
        mine = self._members[request_id].priority
        ahead: list[str] = []
        is_earlier = True
        for other, member in self._members.items():
            if other == request_id:
                is_earlier = False
            elif not member.is_running and (member.priority, not is_earlier) < (mine, True):
                ahead.append(other)
        return ahead

    def running(self) -> list[str]:
        """Who has been admitted."""
        return [found for found, member in self._members.items() if member.is_running]

    def _end_handle(self, request_id: str, handle: int) -> None:
        member = self._members[request_id]
        member.handles = {c: h for c, h in member.handles.items() if h != handle}
        if not member.handles:
            del self._members[request_id]
