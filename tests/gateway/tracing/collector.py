"""A collector that takes spans over OTLP (http/protobuf)."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it arrived; times in nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    is_error: bool
    links: tuple[str, ...]  # ids of spans


@dataclass
class Collector:
    """What arrived, and how it is answered.

    Attributes:
        status: of the next answers.
        answers: cleared, requests are read and not answered.
        resource: attributes of the last request's resource.
    """

    url: str = ""
    status: int = 200
    answers: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)
    paths: list[str] = field(default_factory=list)
    spans: list[ReceivedSpan] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = _attributes(part.resource.attributes)
            for scope in part.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.name,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _attributes(span.attributes),
                        span.status.code == span.status.STATUS_CODE_ERROR,
                        tuple(link.span_id.hex() for link in span.links),
                    )
                    for span in scope.spans
                ]
        self.arrived.set()


def _attributes(pairs: Any) -> dict[str, Any]:
    found: list[KeyValue] = list(pairs)
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in found}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens until the block ends."""
    collector = Collector()
    collector.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, body)
            collector.answers.wait()
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.answers.set()
        server.shutdown()
        server.server_close()
