"""``python -m scheduler_svc``: the scheduler as a process."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from scheduler_svc.observer import Observer
from scheduler_svc.recording import FileRecorder
from scheduler_svc.service import SchedulerService, Superseded
from scheduler_svc.settings import SchedulerSettings
from shared.bus.redis_bus import RedisBus
from shared.bus.server_check import servers_at
from shared.cpu_priority import never_preempt_others
from shared.errors import BusUnavailable, SettingsError
from shared.logs import EventLog, setup_logging
from shared.metrics import SchedulerMetrics
from shared.model_name import model_name
from shared.settings import exit_with, load_or_exit

log = EventLog(__name__)


async def _serve(settings: SchedulerSettings, ready: Callable[[], None]) -> int:
    # What is wrong with a URL is said before a port is taken.
    bus = RedisBus.of_engine(settings.redis_url, settings.engine_id)
    if settings.advertised_redis_url is not None:
        servers_at(settings.advertised_redis_url, "PAGESTREAM_ADVERTISED_REDIS_URL")
    directory = None
    if settings.directory_url is not None:
        directory = RedisBus.of_directory(settings.directory_url)
    metrics = SchedulerMetrics(
        model_name(settings.model, settings.served_model_name), settings.engine_id
    )
    metrics.serve(settings.scheduler_metrics_host, settings.scheduler_metrics_port)
    recorder = None if settings.record is None else FileRecorder(Path(settings.record))
    service = SchedulerService(bus, settings, Observer(metrics), recorder, directory=directory)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, service.stop)
    try:
        log.info("connected to Redis", version=await bus.check_server())
        for warning in await bus.settings_warnings():
            log.warning(warning)
        if directory is not None:
            await _check_directory(directory)
        ready()
        await service.run()
    except (Superseded, BusUnavailable) as error:
        log.error("scheduler gives up", error=error)
        return 1
    finally:
        await bus.close()
        if directory is not None:
            await directory.close()
        if recorder is not None:
            recorder.close()
    return 0


async def _check_directory(directory: RedisBus) -> None:
    """Check the Redis of the directory; one that is away stops no engine.

    Raises:
        SettingsError: it has only a part of the keys, or is no cluster.
    """
    try:
        log.info("connected to directory", version=await directory.check_server())
        for warning in await directory.settings_warnings():
            log.warning(warning, directory=True)
    except BusUnavailable as error:
        log.warning("starting without directory", error=error)


def prepare() -> None:
    """Read the settings and set up logs; all imports are done. Exits with 2 on bad settings."""
    _settings()


def main(ready: Callable[[], None] = lambda: None) -> int:
    """Run until SIGTERM or SIGINT.

    Args:
        ready: called when there is a connection to Redis.

    Returns:
        0 when told to stop, else 1; exits with 2 on bad settings.
    """
    settings = _settings()
    never_preempt_others()
    try:
        return uvloop.run(_serve(settings, ready))
    except SettingsError as error:
        exit_with(error)


def _settings() -> SchedulerSettings:
    settings = load_or_exit(SchedulerSettings, "PageStream's scheduler.")
    setup_logging("scheduler", settings.log_level)
    return settings


if __name__ == "__main__":
    sys.exit(main())
