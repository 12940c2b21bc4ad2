"""Splits a body of multipart/form-data into its parts, while it arrives."""

from collections.abc import Sequence
from dataclasses import dataclass

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.http.errors import ApiError, invalid

FORM_TYPE = "multipart/form-data"
_MOST_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PartBegan:
    """A part of the form begins.

    Attributes:
        filename: None for a field that is no file.
    """

    name: str
    filename: str | None


class FormParser:
    """Turns the bytes of a body into the beginnings of parts, and their data.

    Args:
        content_type: of the body.

    Raises:
        ApiError: 400, the body is no form.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != FORM_TYPE.encode() or not boundary:
            raise invalid(
                "Content-Type",
                f"Content-Type={content_type[:80]!r}: expected {FORM_TYPE} with a boundary",
            )
        self._events: list[PartBegan | bytes] = []
        self._has_ended = False
        self._field, self._value, self._disposition = b"", b"", b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": self._add_field,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._add_data,
                "on_end": self._end,
            },
            max_header_size=_MOST_HEADER_BYTES,
        )

    def feed(self, data: bytes) -> Sequence[PartBegan | bytes]:
        """What these bytes add.

        Raises:
            ApiError: 400, the body is no form.
        """
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _malformed(str(error)) from None
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Check that the form is complete.

        Raises:
            ApiError: 400.
        """
        if not self._has_ended:
            raise _malformed("it ends without its boundary")

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field = self._value = b""

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise _malformed("a part has no name")
        file = None if filename is None else filename.decode(errors="replace")
        self._events.append(PartBegan(name.decode(errors="replace"), file))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(data[start:end])

    def _end(self) -> None:
        self._has_ended = True


def _malformed(reason: str) -> ApiError:
    return invalid(None, f"The body is not valid {FORM_TYPE}: {reason}", "invalid_form")
