"""The state that all endpoints share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.access.api_keys import ApiKeys
from gateway.access.call_limits import CallQuotas
from gateway.engine.engine_status import Engine
from gateway.http.errors import ApiError, shutting_down
from gateway.http.request_bodies import BodyReader
from gateway.models.model_table import ModelTable
from gateway.models.served_model import ServedModel
from gateway.tracing.tracer import Tracer
from shared.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True)
class ReadyLimits:
    """Times without progress after which this gateway is not ready.

    Attributes:
        stall_ms: since the engine's last step, while it has work.
        log_lag_s: since this process last read the log to its end, while calls wait.
    """

    stall_ms: int
    log_lag_s: float


@dataclass(slots=True)
class Service:
    """One gateway.

    Attributes:
        instance: names it in logs.
        models: that it serves.
        quotas: limits on calls in progress, and what they hold.
        max_token_bytes: largest body of a call that tokenizes or detokenizes.
        max_prompts: in one call.
        max_choices: in one call, of all its prompts together.
        resume_window_s: how long a resumable stream runs on without its client.
        tracer: records traces; None: there are none.
        draining: the process ends when its open streams have ended.
    """

    instance: str
    models: ModelTable
    bodies: BodyReader
    resume_window_s: float
    metrics: GatewayMetrics
    keys: ApiKeys
    quotas: CallQuotas
    max_token_bytes: int
    metrics_keys: ApiKeys
    cors_origins: str | None
    max_prompts: int
    max_choices: int
    ready_limits: ReadyLimits
    tracer: Tracer | None = None
    draining: bool = False

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count what is refused."""
        try:
            yield
        except ApiError as error:
            if error.rejection is not None:
                self.metrics.admission_rejections[error.rejection].inc()
            raise

    def ready_engine(self, model: ServedModel) -> Engine:
        """The engine of a model, if it can take requests.

        Raises:
            ApiError: 503, or 429.
        """
        if self.draining:
            raise shutting_down(accepted=False)
        return model.ready_engine()

    def why_not_ready(self) -> ApiError | None:
        """The error for new requests, None if those for one model can be accepted."""
        return shutting_down(accepted=False) if self.draining else self.models.why_none_ready()
