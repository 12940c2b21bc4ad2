"""``python -m scheduler_svc``: the scheduler as a process."""

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from scheduler_svc.observer import Observer
from scheduler_svc.recording import FileRecorder
from scheduler_svc.service import SchedulerService, Superseded
from scheduler_svc.settings import SchedulerSettings
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, SettingsError
from shared.logs import EventLog, setup_logging
from shared.metrics import SchedulerMetrics
from shared.model_name import model_name
from shared.settings import exit_with, load_or_exit

log = EventLog(__name__)


async def _serve(settings: SchedulerSettings) -> int:
    bus = RedisBus(settings.redis_url)  # what is wrong with its URL is said before a port is taken
    metrics = SchedulerMetrics(
        model_name(settings.model, settings.served_model_name), settings.engine_id
    )
    metrics.serve(settings.scheduler_metrics_host, settings.scheduler_metrics_port)
    recorder = None if settings.record is None else FileRecorder(Path(settings.record))
    service = SchedulerService(bus, settings, Observer(metrics), recorder)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, service.stop)
    try:
        log.info("connected to Redis", version=await bus.check_server())
        await service.run()
    except (Superseded, BusUnavailable) as error:
        log.error("scheduler gives up", error=error)
        return 1
    finally:
        await bus.close()
        if recorder is not None:
            recorder.close()
    return 0


def main() -> None:
    """Run until SIGTERM or SIGINT; exit non-zero on failure, 2 on bad settings."""
    settings = load_or_exit(SchedulerSettings, "PageStream's scheduler.")
    setup_logging("scheduler", settings.log_level)
    try:
        sys.exit(uvloop.run(_serve(settings)))
    except SettingsError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
