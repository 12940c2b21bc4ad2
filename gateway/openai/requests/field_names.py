"""Errors about the body of a chat that was made from another body, in that body's words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.http.errors import ApiError


class FieldNames:
    """What the fields of a chat's body are called in another body.

    Args:
        names: patterns of paths, and what stands for them; the first that fits is taken.
    """

    def __init__(self, *names: tuple[re.Pattern[str], str]) -> None:
        self._names = names

    @contextmanager
    def used(self) -> Iterator[None]:
        """Errors about a field of the chat's body name the field of the other body instead."""
        try:
            yield
        except ApiError as error:
            own = None if error.param is None else self._own(error.param)
            if own is None or error.param is None:
                raise
            raise ApiError(
                error.status,
                str(error).replace(error.param, own),
                param=own,
                code=error.code,
                rejection=error.rejection,
                headers=error.headers,
            ) from None

    def _own(self, path: str) -> str | None:
        return next((p.sub(own, path) for p, own in self._names if p.match(path)), None)
