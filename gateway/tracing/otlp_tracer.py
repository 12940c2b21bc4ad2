"""Sends spans to a collector over OTLP (http/protobuf). Imported only where one is set.

OpenTelemetry's own variables apply, such as ``OTEL_TRACES_SAMPLER``, ``OTEL_RESOURCE_ATTRIBUTES``
and ``OTEL_EXPORTER_OTLP_HEADERS``. Attributes are named by its semantic conventions, or
``pagestream.*``.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from gateway.tracing.phases import PhaseSpan
from gateway.tracing.trace_context import TraceContext
from shared.logs import EventLog
from shared.version import version

_log = EventLog("gateway.tracing.otlp_tracer")
_PATH = "/v1/traces"
_MAX_QUEUED = 8192  # spans; beyond it the oldest are dropped
_BATCH = 512
_DELAY_MS = 1_000
_TIMEOUT_S = 5.0  # of one batch, repetitions included
_CLOSE_S = 3.0


class OtlpTracer:
    """Spans wait in a bounded queue for a thread that sends them."""

    def __init__(self, endpoint: str, instance: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)  # it logs each failure
        url = endpoint if has_path(endpoint) else endpoint.rstrip("/") + _PATH
        self._exporter = _ObservedExporter(OTLPSpanExporter(url, timeout=_TIMEOUT_S), url)
        self._provider = TracerProvider(resource=_service(instance), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=_MAX_QUEUED,
                schedule_delay_millis=_DELAY_MS,
                max_export_batch_size=_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("pagestream", version())
        _log.info("sending spans", url=url)

    def begin_call(self, parent: TraceContext | None, method: str) -> "OtlpCallSpan":
        """Begin the span of a call."""
        span = self._tracer.start_span(
            method,
            None if parent is None else _context_of(parent),
            SpanKind.SERVER,
            {"http.request.method": method},
            start_time=time.time_ns(),
        )
        return OtlpCallSpan(span)

    def record(self, span: PhaseSpan) -> None:
        """Record a phase that is over."""
        facts = {f"pagestream.{name}": value for name, value in span.facts.items()}
        new = self._tracer.start_span(
            span.phase.value,
            _context_of(span.parent),
            SpanKind.INTERNAL,
            {
                "pagestream.request_id": span.request_id,
                "pagestream.engine": span.engine_id,
                "gen_ai.request.model": span.model,
                **facts,
            },
            start_time=span.start_ns,
        )
        if span.error:
            new.set_status(Status(StatusCode.ERROR, span.error))
        new.end(span.end_ns)

    def flush(self) -> None:
        """Send what is waiting; blocks until then."""
        self._provider.force_flush()

    async def close(self) -> None:
        """Send what is left, for a short time."""
        # A thread that hangs must not keep the process from ending.
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _CLOSE_S)


class OtlpCallSpan:
    """The span of an HTTP call in progress."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def context(self) -> TraceContext:
        """By which other spans become its children."""
        context = self._span.get_span_context()
        return TraceContext(
            f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled
        )

    def link(self, other: TraceContext) -> None:
        """Link it to another call's span, whose stream it continues."""
        self._span.add_link(_span_context(other))

    def end(self, name: str, status: int, attributes: Mapping[str, Any], error: str) -> None:
        """End it now."""
        span = self._span
        span.update_name(name)
        span.set_attribute("http.response.status_code", status)
        span.set_attributes(attributes)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(time.time_ns())


class _ObservedExporter(SpanExporter):
    """Logs when the collector fails, and when it works again; never each failure."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        self._exporter = exporter
        self._url = url
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                _log.info("spans sent again", url=self._url, lost=self._num_lost)
            self._num_lost = 0
            return result
        if not self._num_lost:
            _log.warning("spans not sent; they are lost until it works again", url=self._url)
        self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def has_path(url: str) -> bool:
    """Whether a URL names more than a host and a port."""
    return url.partition("://")[2].partition("/")[2] != ""


def _service(instance: str) -> Resource:
    """What sends the spans; the user's variables override it."""
    own = {
        "service.name": "pagestream-gateway",
        "service.version": version(),
        "service.instance.id": instance,
    }
    return Resource.create(own | dict(OTELResourceDetector().detect().attributes))


def _span_context(found: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if found.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(found.trace_id, 16), int(found.span_id, 16), True, flags)


def _context_of(found: TraceContext) -> Context:
    return set_span_in_context(NonRecordingSpan(_span_context(found)))
