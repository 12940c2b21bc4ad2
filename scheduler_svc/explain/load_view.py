"""The load of an engine in its outputs log: requests that wait, that run, and their handles."""

from dataclasses import dataclass

from scheduler_svc.explain.timeline import listed
from shared.messages.outputs import RequestState
from shared.outputs_log.events import Step


@dataclass(slots=True)
class _Request:
    priority: int
    handles: dict[int, int]  # by choice that has not ended
    is_running: bool = False


class LoadView:
    """Unfinished requests in the order of their acceptance."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._by_handle: dict[int, str] = {}

    def drop_handles(self) -> None:
        """Forget all requests: the handles are void, and states of unfinished ones will follow."""
        self._requests.clear()
        self._by_handle.clear()

    def stated(self, state: RequestState) -> None:
        """Take the state of a request."""
        request_id = state.submit.request_id
        handles = {c.choice: c.handle for c in state.choices if not c.finish_reason}
        known = self._requests.get(request_id)
        if known is not None and known.handles == handles:
            return
        self.ended(request_id)
        if handles and all(handles.values()):
            self._requests[request_id] = _Request(state.submit.priority, handles)
            self._by_handle.update(dict.fromkeys(handles.values(), request_id))

    def computed(self, step: Step) -> None:
        """Take the admissions and the ends of a step."""
        for handle, _ in step.admissions():
            if (request_id := self._by_handle.get(handle)) is not None:
                self._requests[request_id].is_running = True
        for row in step.ends:
            handle = step.handles[row]
            if (request_id := self._by_handle.pop(handle, None)) is not None:
                self._end_handle(request_id, handle)

    def choice_ended(self, request_id: str, choice: int) -> None:
        """Take the end of one of several choices."""
        request = self._requests.get(request_id)
        if request is not None and choice in request.handles:
            handle = request.handles[choice]
            self._by_handle.pop(handle, None)
            self._end_handle(request_id, handle)

    def ended(self, request_id: str) -> None:
        """Take the end of a request."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for handle in request.handles.values():
                self._by_handle.pop(handle, None)

    def ahead_of(self, request_id: str) -> list[str]:
        """Ids of requests that wait and are admitted before this one."""
        mine = self._requests[request_id].priority
        ahead: list[str] = []
        is_earlier = True
        for other, request in self._requests.items():
            if other == request_id:
                is_earlier = False
            elif not request.is_running and (request.priority, not is_earlier) < (mine, True):
                ahead.append(other)
        return ahead

    def running(self) -> list[str]:
        """Ids of requests that were admitted."""
        return [found for found, request in self._requests.items() if request.is_running]

    def queue_in_words(self, request_id: str) -> str:
        """The requests ahead of it and those that run."""
        ahead, running = self.ahead_of(request_id), self.running()
        if not ahead and not running:
            return "; no request is ahead of it"
        waiting = f"behind {len(ahead)} that wait ({listed(ahead)})" if ahead else ""
        busy = f"beside {len(running)} that run ({listed(running)})" if running else ""
        return "; " + ", ".join(part for part in (waiting, busy) if part)

    def _end_handle(self, request_id: str, handle: int) -> None:
        request = self._requests[request_id]
        request.handles = {c: h for c, h in request.handles.items() if h != handle}
        if not request.handles:
            del self._requests[request_id]
