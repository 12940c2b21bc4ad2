"""Viewers of an engine: a bounded queue of frames for each, and limits on their number."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.http.errors import ApiError, overloaded, unavailable
from shared.engine_view.engine_view import EngineView

MOST_VIEWERS = 32
MOST_VIEWERS_OF_KEY = 8
_MOST_FRAMES = 8  # that a viewer is behind; then it continues with a snapshot


class Viewer:
    """One open page.

    Args:
        tenant: name of the API key; ids of its requests are shown.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._events: deque[tuple[str, str]] = deque()
        self._needs_snapshot = True
        self._named: set[int] = set()
        self._changed = asyncio.Event()
        self._is_ended = False

    def show(self, name: str, data: str) -> None:
        """Queue an event; a viewer that reads too slowly skips to a snapshot."""
        if name == "frame" and self._needs_snapshot:
            self._changed.set()
            return
        if len(self._events) >= _MOST_FRAMES:
            self._events.clear()
            self._needs_snapshot = True
        else:
            self._events.append((name, data))
        self._changed.set()

    def show_snapshot(self) -> None:
        """Continue with a snapshot: the view is another one."""
        self._events.clear()
        self._needs_snapshot = True
        self._changed.set()

    def end(self) -> None:
        """Let the stream end after what is queued."""
        self._is_ended = True
        self._changed.set()

    async def next(
        self, snapshot: Callable[[], str], view: Callable[[], EngineView | None], patience_s: float
    ) -> bytes | None:
        """The next Server-Sent Events; a comment if there is nothing for so long; None: the end.

        Args:
            snapshot: gives the state of this moment, "" if there is none.
        """
        self._changed.clear()
        if not self._events and not (self._needs_snapshot and snapshot()):
            if self._is_ended:
                return None
            try:
                async with asyncio.timeout(patience_s):
                    await self._changed.wait()
            except TimeoutError:
                return b": \n\n"
        text = ""
        if self._needs_snapshot and (data := snapshot()):
            self._needs_snapshot = False
            self._named.clear()
            text += _event("snapshot", data)
        while self._events:
            text += _event(*self._events.popleft())
        if (found := view()) is not None and not self._needs_snapshot:
            names = self._names(found)
            text = (_event("names", json.dumps(names)) if names else "") + text
        return text.encode()

    def _names(self, view: EngineView) -> list[tuple[int, str]]:
        """Ids of the viewer's own requests that it was not sent before."""
        names = [
            (found.number, found.request_id)
            for found in view.requests.values()
            if found.tenant == self._tenant and found.number not in self._named
        ]
        self._named.update(number for number, _ in names)
        return names


class Viewers:
    """The open pages of this gateway."""

    def __init__(self) -> None:
        self._by_key: Counter[str] = Counter()

    @contextmanager
    def place_for(self, key: str) -> Iterator[None]:
        """A place for one more viewer.

        Args:
            key: name of its API key; "" where none are required.

        Raises:
            ApiError: 429, the key has too many; 503, all have together.
        """
        if error := self._why_none(key):
            raise error
        self._by_key[key] += 1
        try:
            yield
        finally:
            self._by_key[key] -= 1

    def _why_none(self, key: str) -> ApiError | None:
        if self._by_key.total() >= MOST_VIEWERS:
            return unavailable(f"{MOST_VIEWERS} pages are open at this gateway, which is the most")
        if key and self._by_key[key] >= MOST_VIEWERS_OF_KEY:
            return overloaded(f"{MOST_VIEWERS_OF_KEY} pages of this key are open: that is the most")
        return None


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"
