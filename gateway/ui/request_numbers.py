"""Numbers that stand for the ids of requests on the page."""

from collections import OrderedDict

_MOST = 65_536


class RequestNumbers:
    """Gives each request a number of this process, which tells nothing of its id.

    Those that were asked for last are remembered.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._last = 0

    def of(self, request_id: str) -> int:
        """The number of a request; equal for equal ids, never 0."""
        found = self._numbers.get(request_id)
        if found is None:
            self._last += 1
            found = self._numbers[request_id] = self._last
            if len(self._numbers) > _MOST:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(request_id)
        return found
