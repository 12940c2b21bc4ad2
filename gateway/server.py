"""One gateway process: listens, serves, drains, leaves."""

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from gateway.app import create_app
from gateway.engine import EngineClient
from gateway.prefix_file import read_prefixes
from gateway.prompts import PromptReader
from gateway.service import Service
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from shared.bus.api import Bus
from shared.logs import EventLog
from shared.metrics import GatewayMetrics
from shared.model_name import model_name

_log = EventLog("gateway.server")

_KEEP_ALIVE_S = 75  # longer than load balancers keep idle connections
_LAST_EVENTS_S = 3.0  # for the error events of streams that drain_timeout cut
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server:
    """Serves one engine until a signal, or until its own loop of the log fails.

    Attributes:
        port: the one that is listened on, 0 before.

    Raises:
        SettingsError: the prefixes that are to be pinned cannot be read.
    """

    def __init__(self, settings: GatewaySettings, bus: Bus, tokenizer: Tokenizer) -> None:
        name = model_name(settings.model, settings.served_model_name)
        metrics = GatewayMetrics(name, settings.engine_id)
        instance = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        prefixes = read_prefixes(settings.pinned_prefixes, tokenizer)
        self.port = 0
        self.service = Service(
            model_name=name,
            max_body_bytes=settings.max_body_bytes,
            created=int(time.time()),
            resume_window_s=settings.resume_window,
            tokenizer=tokenizer,
            prompts=PromptReader(tokenizer, settings.max_prompts),
            engine=EngineClient(
                bus,
                settings.engine_id,
                name,
                instance,
                metrics,
                prefixes,
                settings.bus_patience,
            ),
            metrics=metrics,
        )
        self._settings = settings
        self._leave = asyncio.Event()
        self._listening = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to leave; the exit status of the process."""
        http = _Http(self._config())
        engine = asyncio.create_task(self.service.engine.run())
        serving = asyncio.create_task(http.serve())
        leaving = asyncio.create_task(self._leave.wait())
        announcing = asyncio.create_task(self._announce(http))
        failed = False
        try:
            await asyncio.wait({engine, serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            # Without the loop of the log streams would wait forever: better to leave with an error.
            failed = not leaving.done()
            await self._drain(0.0 if failed else self._settings.drain_timeout)
            http.should_exit = True
            await asyncio.wait({serving}, timeout=2 * _LAST_EVENTS_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._flush(engine), _LAST_EVENTS_S)
        finally:
            tasks = (engine, serving, leaving, announcing)
            ended_well = [await _end(task) for task in tasks]
            self.service.prompts.close()
        return 1 if failed or not all(ended_well) else 0

    async def listening(self) -> int:
        """The port, as soon as connections are accepted."""
        await self._listening.wait()
        return self.port

    def leave(self) -> None:
        """Accept nothing more, let open streams end, and return from ``run``."""
        self._leave.set()

    async def _drain(self, timeout_s: float) -> None:
        self.service.draining = True
        engine = self.service.engine
        _log.info("draining", open_requests=engine.num_open, timeout_s=timeout_s)
        try:
            await asyncio.wait_for(engine.all_closed(), timeout_s)
        except TimeoutError:
            _log.warning("ending open streams", open_requests=engine.num_open)
            engine.leave()

    async def _flush(self, engine: "asyncio.Task[None]") -> None:
        """Stops and Aborts of the last moment should still be heard."""
        if not engine.done():
            await self.service.engine.flushed()

    async def _announce(self, http: "_Http") -> None:
        await http.bound.wait()
        self.port = http.servers[0].sockets[0].getsockname()[1]
        self._listening.set()
        _log.info(
            "listening",
            url=f"http://{self._settings.host}:{self.port}",
            model=self.service.model_name,
            engine=self._settings.engine_id,
        )

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            create_app(self.service),
            host=self._settings.host,
            port=self._settings.port,
            lifespan="off",
            ws="none",
            http="httptools",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_LAST_EVENTS_S),
        )


async def _end(task: "asyncio.Task[Any]") -> bool:
    """Cancel a task and wait for it; whether it did not fail."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    except Exception:
        _log.exception("failed")
        return False
    return True


class _Http(uvicorn.Server):
    """uvicorn without its own handling of signals, which would close streams too early."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.bound = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            # The address is in use, or not ours; uvicorn has logged it.
            raise OSError("cannot listen") from None
        if self.started:
            self.bound.set()


def leave_on_signals(server: Server) -> None:
    """Leave in good order at the first SIGTERM or SIGINT, at once at the second."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: int) -> None:
        if seen:
            _log.warning("second signal, leaving at once", signal=number)
            os._exit(128 + number)
        seen.append(number)
        server.leave()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
