"""One model: all that calls need of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.answers.answer_formats import AnswerFormats
from gateway.engine.engine_status import Engine, EngineAway
from gateway.engine.engines import Engines
from gateway.grammars.compiler import GrammarCompiler
from gateway.http.errors import ApiError, overloaded, unavailable
from gateway.models.model_files import ModelFiles
from gateway.prompts.tokenization import PromptReader
from gateway.settings import GatewaySettings
from gateway.text.tokenizer import Tokenizer
from shared.metrics import ModelMetrics


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model, and the engines that have it.

    Attributes:
        name: that clients give.
        root: the folder, file or hub id that its files were read from.
        created: since when it is served here, seconds since 1970.
        answers: the formats in which it answers.
        defaults: of sampling parameters, where the model's differ from the API's.
        engine: the engine that has it, or all engines of a fleet that have it.
    """

    name: str
    root: str
    created: int
    tokenizer: Tokenizer
    prompts: PromptReader
    grammars: GrammarCompiler
    answers: AnswerFormats
    defaults: Mapping[str, Any]
    engine: Engines
    metrics: ModelMetrics

    @staticmethod
    def of(
        files: ModelFiles, engine: Engines, metrics: ModelMetrics, settings: GatewaySettings
    ) -> "ServedModel":
        """A model whose files were read."""
        limits = (settings.max_prompts, settings.template_timeout, settings.max_prompt_chars)
        return ServedModel(
            name=files.name,
            root=files.root,
            created=int(time.time()),
            tokenizer=files.tokenizer,
            prompts=PromptReader(files.tokenizer, *limits),
            grammars=GrammarCompiler(files.tokenizer.as_json),
            answers=files.answers,
            defaults=files.defaults,
            engine=engine,
            metrics=metrics,
        )

    @property
    def ready(self) -> Engine | None:
        """The engine, if it can take requests."""
        status = self.engine.status
        return status if isinstance(status, Engine) else None

    def ready_engine(self) -> Engine:
        """The engine.

        Raises:
            ApiError: 503, it cannot take requests; 429, Redis has no memory for them.
        """
        engine = self.ready
        if engine is None:
            reason = self.why_not_ready()
            assert reason is not None, self.name
            raise reason
        if self.engine.is_short_of_memory:
            raise overloaded("Redis is short of memory; what was accepted is finished first")
        return engine

    def why_not_ready(self) -> ApiError | None:
        """The error for new requests, None if they can be accepted."""
        status = self.engine.status
        return unavailable(status.detail) if isinstance(status, EngineAway) else None

    def close(self) -> None:
        """Stop its threads and processes; no call may use it afterwards."""
        self.grammars.close()
        self.prompts.close()
