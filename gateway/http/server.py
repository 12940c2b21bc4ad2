"""One gateway process: listens, serves, drains, stops."""

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gateway.access.api_keys import ApiKeys
from gateway.access.call_limits import CallLimits, CallQuotas
from gateway.access.priorities import PriorityRange
from gateway.batches.service import Batches
from gateway.engine.readiness import readiness
from gateway.http.app import create_app
from gateway.http.connection_limits import connections_that_fit
from gateway.http.management import management_app
from gateway.http.request_bodies import BodyReader
from gateway.http.uvicorn_server import LAST_EVENTS_S, HttpServer, connection_limits
from gateway.models.model_files import ModelFiles
from gateway.models.model_source import model_table
from gateway.responses.service import Responses
from gateway.service import ReadyLimits, Service
from gateway.settings import GatewaySettings
from gateway.tracing.tracer import tracer_of
from shared.bus.api import Bus
from shared.errors import SettingsError
from shared.logs import EventLog
from shared.metrics import GatewayMetrics
from shared.tasks import cancel_until_done, run_together

_log = EventLog("gateway.http.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server:
    """Serves models until a signal arrives, or until the reader of an outputs log fails.

    Args:
        files: of the model of the engine on ``bus``; None: there is a directory.
        directory: of the fleet whose engines are served.

    Attributes:
        port: on which it listens, 0 before.
        connections: open connections of clients.

    Raises:
        SettingsError: the API keys cannot be read, or packages are missing.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        bus: Bus,
        files: ModelFiles | None,
        directory: Bus | None = None,
    ) -> None:
        instance = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        keys = ApiKeys(settings.api_keys, settings.api_key, priorities=_priorities(settings))
        tracer = tracer_of(settings.otlp_endpoint, instance)
        metrics = GatewayMetrics("" if files is None else files.name, settings.engine_id)
        self.port = 0
        self.connections: set[Any] = set()
        self.service = Service(
            instance=instance,
            models=model_table(settings, bus, files, directory, instance, metrics, tracer),
            bodies=BodyReader(settings.max_body_bytes),
            resume_window_s=settings.resume_window,
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
        app = create_app(
            *(self.service, self._responses, self._batches),
            *(settings.ui, settings.ui_recordings),
        )
        http = HttpServer(app, settings.host, settings.port, self._limits)
        self.connections = http.server_state.connections
        engine = asyncio.create_task(self.service.models.run())
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
            self.service.models.close()
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
        models = self.service.models
        _log.info("draining", open_requests=models.num_open, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await models.all_closed()
        except TimeoutError:
            _log.warning("ending open streams", open_requests=models.num_open)
            models.leave()

    async def _flush(self, engine: "asyncio.Task[None]") -> None:
        """Append the last Stops and Aborts to the log."""
        if not engine.done():
            await self.service.models.flushed()

    async def _announce(self, http: HttpServer, ready: Callable[[], None]) -> None:
        await http.bound.wait()
        self.port = http.port
        self._listening.set()
        if not self.service.keys.are_required and not _is_loopback(self._settings.host):
            _log.warning("no API keys: every client that reaches the port may use it")
        served = self.service.models.served  # none yet in a fleet
        place = {"model": served[0].name, "engine": self._settings.engine_id} if served else {}
        _log.info("listening", url=f"http://{self._settings.host}:{self.port}", **place)
        ready()


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
