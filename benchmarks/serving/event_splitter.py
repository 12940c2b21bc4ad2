"""Splits a byte stream into Server-Sent Events."""


class EventSplitter:
    """Splits a stream into the data of its events.

    Lines may end in CR, LF or both, and a piece may end anywhere, even between the two. Comments
    and fields other than ``data`` are skipped, and so is an event without data.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes."""
        text = self._rest + piece
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # perhaps the first half of CR LF
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = text.split(b"\n\n")
        self._rest = rest + held
        return [data for event in events if (data := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all events are of this form
        return event[6:]
    lines = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
    return b"\n".join(lines) if lines else None
