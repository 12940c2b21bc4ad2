"""The header ``traceparent``."""

import pytest

from gateway.tracing.trace_context import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_a_context_is_read(text: str, is_sampled: bool) -> None:
    assert TraceContext.parse(text) == TraceContext(TRACE, SPAN, is_sampled)


def test_a_context_is_written_as_version_0() -> None:
    assert str(TraceContext(TRACE, SPAN, True)) == f"00-{TRACE}-{SPAN}-01"
    assert str(TraceContext(TRACE, SPAN, False)) == f"00-{TRACE}-{SPAN}-00"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}\n-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 100_000,
    ],
)
def test_what_is_no_context_is_ignored(text: str) -> None:
    assert TraceContext.parse(text) is None


def test_of_several_headers_none_counts() -> None:
    header = (b"traceparent", f" 00-{TRACE}-{SPAN}-01".encode())
    other = (b"accept", b"*/*")
    assert TraceContext.of([other, header]) == TraceContext(TRACE, SPAN, True)
    assert TraceContext.of([header, header]) is None
    assert TraceContext.of([other]) is None
    assert TraceContext.of([(b"traceparent", b"\xff\xfe")]) is None
