"""The state that all endpoints share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gateway.access.api_keys import ApiKeys
from gateway.access.call_limits import CallQuotas
from gateway.answers.answer_formats import AnswerFormats
from gateway.engine.engine_status import Engine, EngineAway
from gateway.engine.engines import Engines
from gateway.grammars.compiler import GrammarCompiler
from gateway.http.errors import ApiError, overloaded, shutting_down, unavailable, unknown_model
from gateway.http.request_bodies import BodyReader
from gateway.prompts.tokenization import PromptReader
from gateway.text.tokenizer import Tokenizer
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
        model_root: the model's folder or hub id.
        created: when it started, seconds since 1970.
        answers: the formats in which the model answers.
        defaults: of sampling parameters, where the model's differ from the API's.
        quotas: limits on calls in progress, and what they hold.
        max_token_bytes: largest body of a call that tokenizes or detokenizes.
        max_prompts: in one call.
        max_choices: in one call, of all its prompts together.
        resume_window_s: how long a resumable stream runs on without its client.
        tracer: records traces; None: there are none.
        draining: the process ends when its open streams have ended.
    """

    model_name: str
    model_root: str
    bodies: BodyReader
    created: int
    resume_window_s: float
    tokenizer: Tokenizer
    prompts: PromptReader
    grammars: GrammarCompiler
    answers: AnswerFormats
    defaults: Mapping[str, Any]
    engine: Engines
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

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here.

        Raises:
            ApiError: 404.
        """
        if name is not None and name != self.model_name:
            raise unknown_model(name)

    def ready_engine(self) -> Engine:
        """The engine, if it can take requests.

        Raises:
            ApiError: 503.
        """
        reason = self.why_not_ready()
        if reason is not None:
            raise reason
        if self.engine.is_short_of_memory:
            raise overloaded("Redis is short of memory; what was accepted is finished first")
        engine = self.engine.status
        assert isinstance(engine, Engine), engine
        return engine

    def why_not_ready(self) -> ApiError | None:
        """The error for new requests, None if they can be accepted."""
        if self.draining:
            return shutting_down(accepted=False)
        status = self.engine.status
        return unavailable(status.detail) if isinstance(status, EngineAway) else None
