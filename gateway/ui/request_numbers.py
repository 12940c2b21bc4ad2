"""Numbers that stand for the ids of requests on the page."""

from collections import OrderedDict

_MOST = 16_384
_MOST_MEANWHILE = 1_000  # numbers that this process gives while another works


class RequestNumbers:
    """Gives each request a number of this process, which tells nothing of its id.

    Those that were asked for last are remembered.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._ids: dict[int, str] = {}
        self._last = 0

    def of(self, request_id: str) -> int:
        """The number of a request; equal for equal ids, never 0."""
        found = self._numbers.get(request_id)
        if found is None:
            self._last += 1
            found = self._last
            self._enter(request_id, found)
        else:
            self._numbers.move_to_end(request_id)
        return found

    @property
    def known(self) -> list[tuple[int, str]]:
        """Numbers and ids that are remembered."""
        return [(number, request_id) for request_id, number in self._numbers.items()]

    @property
    def next_elsewhere(self) -> int:
        """From here on another process may give numbers for a moment; see ``learn``."""
        return self._last + _MOST_MEANWHILE

    def learn(self, request_id: str, number: int) -> None:
        """Remember a number that another process gave."""
        if request_id not in self._numbers:
            self._last = max(self._last, number)
            self._enter(request_id, number)

    def id_of(self, number: int) -> str | None:
        """The request with this number; None if it is not remembered."""
        return self._ids.get(number)

    def _enter(self, request_id: str, number: int) -> None:
        self._numbers[request_id] = number
        self._ids[number] = request_id
        if len(self._numbers) > _MOST:
            self._ids.pop(self._numbers.popitem(last=False)[1], None)
