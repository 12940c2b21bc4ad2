"""What records traces, if ``--otlp-endpoint`` names a collector."""

from collections.abc import Mapping
from typing import Any, Protocol

from gateway.tracing.phases import PhaseSpan
from gateway.tracing.trace_context import TraceContext
from shared.errors import SettingsError


class CallSpan(Protocol):
    """The span of an HTTP call in progress."""

    @property
    def context(self) -> TraceContext:
        """By which other spans become its children."""
        ...

    def link(self, other: TraceContext) -> None:
        """Link it to another call's span, whose stream it continues."""
        ...

    def end(self, name: str, status: int, attributes: Mapping[str, Any], error: str) -> None:
        """End it now.

        Args:
            name: of few values, such as ``POST /v1/completions``.
            status: of the response.
            error: why the call failed by a fault of the server; "" otherwise.
        """
        ...


class Tracer(Protocol):
    """Records spans. No method but ``close`` blocks, whatever becomes of the collector."""

    def begin_call(self, parent: TraceContext | None, method: str) -> CallSpan:
        """Begin the span of a call.

        Args:
            parent: the client's span; None: it gave none.
        """
        ...

    def record(self, span: PhaseSpan) -> None:
        """Record a phase that is over."""
        ...

    async def close(self) -> None:
        """Send what is left, for a short time."""
        ...


def tracer_of(endpoint: str | None, instance: str) -> Tracer | None:
    """The tracer of a gateway; None if no endpoint is set, and then no package of it is imported.

    Raises:
        SettingsError: the packages are not installed.
    """
    if endpoint is None:
        return None
    try:
        from gateway.tracing.otlp_tracer import OtlpTracer
    except ImportError as error:
        raise SettingsError(
            "otlp_endpoint",
            endpoint,
            f"{error}; install what it needs: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http",
        ) from error
    return OtlpTracer(endpoint, instance)
