"""The trace that a call belongs to, as the header ``traceparent`` names it.

Source: W3C Trace Context, https://www.w3.org/TR/trace-context/.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_HEADER = b"traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_CHARS = 512
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span in a trace.

    Attributes:
        trace_id: 32 hex digits, not all zero.
        span_id: 16 hex digits, not all zero.
        is_sampled: the spans of the trace are recorded.
    """

    trace_id: str
    span_id: str
    is_sampled: bool

    @classmethod
    def parse(cls, text: str) -> "TraceContext | None":
        """The context in a ``traceparent``; None if the text is none, as its standard demands."""
        match = _FORM.fullmatch(text) if len(text) <= _MAX_CHARS else None
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        # Later versions may append fields to those of version 00.
        if version == "ff" or (version == "00" and more is not None):
            return None
        if not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]]) -> "TraceContext | None":
        """The context that a call came with; None if there is none, or more than one."""
        given = [value for name, value in headers if name == _HEADER]
        return cls.parse(given[0].decode("latin-1").strip()) if len(given) == 1 else None

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"
