"""One gateway process: listens, serves, drains, stops."""

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gateway.access.api_keys import ApiKeys
from gateway.access.call_limits import CallLimits, CallQuotas
from gateway.access.priorities import PriorityRange
from gateway.answers.answer_formats import AnswerFormats
from gateway.batches.service import Batches
from gateway.engine.client import EngineClient
from gateway.engine.engines import Engines
from gateway.engine.readiness import readiness
from gateway.fleet.directory import Directory
from gateway.fleet.fleet import Fleet
from gateway.grammars.compiler import GrammarCompiler
from gateway.http.app import create_app
from gateway.http.connection_limits import connections_that_fit
from gateway.http.management import management_app
from gateway.http.request_bodies import BodyReader
from gateway.http.uvicorn_server import LAST_EVENTS_S, HttpServer, connection_limits
from gateway.pins.pin_requests import Prefix
from gateway.pins.prefix_file import read_prefixes
from gateway.prompts.tokenization import PromptReader
from gateway.responses.service import Responses
from gateway.service import ReadyLimits, Service
from gateway.settings import GatewaySettings
from gateway.text.tokenizer import Tokenizer
from gateway.tracing.phases import PhaseTracker
from gateway.tracing.tracer import Tracer, tracer_of
from shared.bus.api import Bus
from shared.bus.redis_bus import RedisBus
from shared.errors import SettingsError
from shared.logs import EventLog
from shared.metrics import GatewayMetrics
from shared.model_name import model_name
from shared.tasks import cancel_until_done, run_together

_log = EventLog("gateway.http.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server:
    """Serves one engine until a signal arrives, or until the reader of the outputs log fails.

    Args:
        defaults: of sampling parameters, by name; the API's for others.
        directory: of the fleet whose engines are served; None: the engine on ``bus`` is.

    Attributes:
        port: on which it listens, 0 before.
        connections: open connections of clients.

    Raises:
        SettingsError: the pinned prefixes or the API keys cannot be read, or packages are missing.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        bus: Bus,
        tokenizer: Tokenizer,
        defaults: Mapping[str, Any] | None = None,
        directory: Bus | None = None,
    ) -> None:
        name = model_name(settings.model, settings.served_model_name)
        metrics = GatewayMetrics(name, settings.engine_id)
        instance = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        prefixes = read_prefixes(settings.pinned_prefixes, tokenizer)
        keys = ApiKeys(settings.api_keys, settings.api_key, priorities=_priorities(settings))
        tracer = tracer_of(settings.otlp_endpoint, instance, name)
        self.port = 0
        self.connections: set[Any] = set()
        self.service = Service(
            model_name=name,
            model_root=settings.model,
            bodies=BodyReader(settings.max_body_bytes),
            created=int(time.time()),
            resume_window_s=settings.resume_window,
            tokenizer=tokenizer,
            grammars=GrammarCompiler(tokenizer.as_json),
            prompts=PromptReader(
                tokenizer,
                settings.max_prompts,
                settings.template_timeout,
                settings.max_prompt_chars,
            ),
            answers=_answer_formats(settings, tokenizer),
            defaults=defaults or {},
            engine=_engines(settings, bus, directory, name, instance, metrics, prefixes, tracer),
            metrics=metrics,
            keys=keys,
            quotas=CallQuotas(call_limits(settings)),
            max_token_bytes=settings.max_tokenize_bytes,
            metrics_keys=ApiKeys(None, settings.metrics_key, "PAGESTREAM_METRICS_KEY"),
            cors_origins=settings.cors_origins,
            max_prompts=settings.max_prompts,
            max_choices=settings.max_choices,
            ready_limits=ReadyLimits(int(1000 * settings.max_stall), settings.max_log_lag),
            tracer=tracer,
        )
        kept = directory or bus  # what all gateways must find
        self._responses = Responses(self.service, kept, settings)
        self._batches = Batches(self.service, self._responses, kept, settings)
        self._limits = connection_limits(settings, connections_that_fit(settings.max_connections))
        self._settings = settings
        self._stopping = asyncio.Event()
        self._listening = asyncio.Event()

    async def run(self, ready: Callable[[], None] = lambda: None) -> int:
        """Serve until ``stop`` is called; return the exit status of the process.

        Args:
            ready: called when connections are accepted.
        """
        settings = self._settings
        app = create_app(self.service, self._responses, self._batches, settings.ui)
        http = HttpServer(app, settings.host, settings.port, self._limits)
        self.connections = http.server_state.connections
        engine = asyncio.create_task(self.service.engine.run())
        background = asyncio.create_task(run_together(self._responses.run(), self._batches.run()))
        servers = [http, *self._management()]
        serving = [asyncio.create_task(server.serve()) for server in servers]
        leaving = asyncio.create_task(self._stopping.wait())
        announcing = asyncio.create_task(self._announce(http, ready))
        failed = False
        try:
            working = (engine, leaving, background, *serving)
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            # Without the reader of the log, streams would wait forever.
            failed = not leaving.done()
            self.service.draining = True
            await cancel_until_done(background)
            await self._drain(0.0 if failed else settings.drain_timeout)
            for server in servers:
                server.should_exit = True
            await asyncio.wait(serving, timeout=2 * LAST_EVENTS_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_EVENTS_S):
                    await self._flush(engine)
        finally:
            tasks = (background, engine, *serving, leaving, announcing)
            ended_well = [await _end(task) for task in tasks]
            self.service.grammars.close()
            self.service.prompts.close()
            self.service.bodies.close()
            if self.service.tracer is not None:
                await self.service.tracer.close()
        return 1 if failed or not all(ended_well) else 0

    async def listening(self) -> int:
        """The port, as soon as connections are accepted."""
        await self._listening.wait()
        return self.port

    def stop(self) -> None:
        """Accept no more calls, let open streams end, and return from ``run``."""
        self._stopping.set()

    def reload_keys(self) -> None:
        """Read the file of API keys again; if it cannot be used, the old keys stay."""
        try:
            _log.info("API keys read", keys=self.service.keys.reload())
        except SettingsError as error:
            _log.error("API keys not read, the old ones stay", error=error)

    def _management(self) -> list[HttpServer]:
        """The server of metrics and health on a port of its own, if there is one."""
        host, port = self._settings.gateway_metrics_host, self._settings.gateway_metrics_port
        if not port:
            return []
        app = management_app(self.service.metrics, lambda: readiness(self.service))
        return [HttpServer(app, host, port, self._limits)]

    async def _drain(self, timeout_s: float) -> None:
        engine = self.service.engine
        _log.info("draining", open_requests=engine.num_open, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await engine.all_closed()
        except TimeoutError:
            _log.warning("ending open streams", open_requests=engine.num_open)
            engine.leave()

    async def _flush(self, engine: "asyncio.Task[None]") -> None:
        """Append the last Stops and Aborts to the log."""
        if not engine.done():
            await self.service.engine.flushed()

    async def _announce(self, http: HttpServer, ready: Callable[[], None]) -> None:
        await http.bound.wait()
        self.port = http.port
        self._listening.set()
        if not self.service.keys.are_required and not _is_loopback(self._settings.host):
            _log.warning("no API keys: every client that reaches the port may use it")
        _log.info(
            "listening",
            url=f"http://{self._settings.host}:{self.port}",
            model=self.service.model_name,
            engine=self._settings.engine_id,
        )
        ready()


def _answer_formats(settings: GatewaySettings, tokenizer: Tokenizer) -> AnswerFormats:
    answers = tokenizer.answer_formats(settings.tool_call_parser, settings.reasoning_parser)
    calls = (answers.calls if answers.describes_tools else None) or "none"
    _log.info("formats of answers chosen", calls=calls, reasoning=answers.reasoning or "none")
    return answers


def _engines(
    settings: GatewaySettings,
    bus: Bus,
    directory: Bus | None,
    model: str,
    instance: str,
    metrics: GatewayMetrics,
    prefixes: Sequence[Prefix],
    tracer: Tracer | None,
) -> Engines:
    """The engine of the settings, or the fleet of a directory."""

    def client(
        bus: Bus, engine_id: str, on_released: Callable[[str], None] | None = None
    ) -> EngineClient:
        patience_s = settings.bus_patience
        phases = None
        if tracer is not None:
            phases = PhaseTracker(engine_id, tracer.record, time.time_ns)
        return EngineClient(
            *(bus, engine_id, model, instance, metrics, prefixes, patience_s, phases, on_released)
        )

    if directory is None:
        return client(bus, settings.engine_id)
    return Fleet(
        Directory(directory),
        model,
        instance,
        metrics,
        RedisBus,
        client,
        settings.bus_patience,
        settings.engine_patience,
        prefixes,
        settings.resume_window,
    )


def _priorities(settings: GatewaySettings) -> PriorityRange | None:
    return None if settings.priorities is None else PriorityRange.parse(settings.priorities)


def call_limits(settings: GatewaySettings) -> CallLimits:
    """What calls in progress may hold."""
    return CallLimits(
        max_calls=settings.max_concurrent_calls,
        max_body_bytes=settings.max_body_bytes,
        max_total_body_bytes=max(settings.max_total_body_bytes, settings.max_body_bytes),
        max_total_token_bytes=max(settings.max_total_tokenize_bytes, settings.max_tokenize_bytes),
        max_key_share=settings.max_key_share,
        body_timeout_s=settings.request_timeout,
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


async def _end(task: "asyncio.Task[Any]") -> bool:
    """Cancel a task until it has ended; return False if it failed."""
    await cancel_until_done(task)
    try:
        task.result()
    except asyncio.CancelledError:
        pass
    except Exception:
        _log.exception("failed")
        return False
    return True


def handle_signals(server: Server) -> None:
    """Drain and stop at the first SIGTERM or SIGINT, exit at once at the second.

    SIGHUP reads the API keys again.
    """
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: int) -> None:
        if seen:
            _log.warning("second signal, leaving at once", signal=number)
            os._exit(128 + number)
        seen.append(number)
        server.stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, server.reload_keys)
