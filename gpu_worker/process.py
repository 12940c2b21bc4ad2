"""The worker as a process: signals, states on the bus, exit codes."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from uuid import uuid4

import uvloop

from gpu_worker.kv.prefault import populate
from gpu_worker.lease import Lease
from gpu_worker.observer import Observer
from gpu_worker.service import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from gpu_worker.step.compute_thread import compute_thread, look_ahead, waiting_thread
from gpu_worker.step.executor import Executor
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, ModelUnsupported, SettingsError
from shared.logs import EventLog
from shared.metrics import WorkerMetrics
from shared.model_name import model_name
from shared.tasks import cancel_until_done

EXIT_HOPELESS = 78  # EX_CONFIG: a restart would end the same way
_RANK = 0

log = EventLog(__name__)


def run(settings: WorkerSettings, ready: Callable[[], None]) -> int:
    """Load the model, serve until SIGTERM or SIGINT; the process's exit code.

    Args:
        ready: called when plans can be carried out.
    """
    instance = uuid4().hex
    _publish(settings, lambda lease: lease.loading(instance))
    try:
        worker = build_worker(settings)
    except (ModelUnsupported, SettingsError) as error:
        log.error("this model cannot be served", reason=error)
        why = str(error)
        _publish(settings, lambda lease: lease.failed(instance, why))
        return EXIT_HOPELESS
    except Exception as error:
        log.exception("the worker could not start")
        why = f"{type(error).__name__}: {error}"
        _publish(settings, lambda lease: lease.failed(instance, why))
        return 1
    return uvloop.run(_serve(settings, worker, ready))


def _publish(settings: WorkerSettings, say: Callable[[Lease], Awaitable[None]]) -> None:
    """Say one thing through a connection of its own; loading blocks, and so keeps none."""

    async def publish() -> None:
        bus = RedisBus(settings.redis_url)
        try:
            await say(Lease(bus, EngineKeys(settings.engine_id), _RANK))
        except BusUnavailable as error:
            log.warning("Redis does not hear the worker's state", error=error)
        finally:
            await bus.close()

    asyncio.run(publish())


async def _serve(settings: WorkerSettings, worker: Worker, ready: Callable[[], None]) -> int:
    metrics = WorkerMetrics(
        model_name(settings.model, settings.served_model_name), settings.engine_id
    )
    metrics.kv_pool_bytes.set(worker.pool_bytes)
    metrics.weight_bytes.set(worker.weight_bytes)
    metrics.serve(settings.worker_metrics_host, settings.worker_metrics_port)
    bus = RedisBus(settings.redis_url)
    executor = worker.executor
    waiting = waiting_thread(executor.device)
    service = WorkerService(
        bus,
        settings.engine_id,
        executor,
        worker.model,
        executor.limits.kv,
        worker.speeds,
        Observer(metrics, executor),
        _RANK,
        ready=ready,
        thread=compute_thread(executor.device),
        look_ahead=look_ahead(executor),
        pipeline=None if waiting is None else executor,
        waiting=waiting,
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, service.stop)
    populating = asyncio.create_task(_populate(executor, service))
    try:
        await service.run()
    except Exception:
        log.exception("a step failed")
        return 1
    finally:
        await cancel_until_done(populating)
        await bus.close()
    return 0


async def _populate(executor: Executor, service: WorkerService) -> None:
    """Take the memory of a pool on the CPU, while no step is under way."""
    if executor.device.type == "cpu":
        await populate(executor.memory.layers.values(), lambda: service.is_computing)
