"""The worker as a process: its signals, its states on the bus, its exit codes."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from uuid import uuid4

import uvloop

from gpu_worker.kv.prefault import prefault
from gpu_worker.lease import Lease
from gpu_worker.observer import Observer
from gpu_worker.service import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from gpu_worker.step.compute_thread import compute_thread, premapper, waiting_thread
from gpu_worker.step.executor import Executor
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, ModelUnsupported, SettingsError
from shared.logs import EventLog
from shared.metrics import WorkerMetrics
from shared.model_name import model_name
from shared.tasks import cancel_until_done

EXIT_HOPELESS = 78  # EX_CONFIG: a restart would end the same way

log = EventLog(__name__)


def run(settings: WorkerSettings, ready: Callable[[], None]) -> int:
    """Load the model and serve until SIGTERM or SIGINT.

    Args:
        settings: of the worker.
        ready: called when plans can be carried out.

    Returns:
        The exit code of the process.
    """
    instance = uuid4().hex
    _publish(settings, lambda lease: lease.publish_loading(instance))
    try:
        worker = build_worker(settings)
    except (ModelUnsupported, SettingsError) as error:
        log.error("this model cannot be served", reason=error)
        why = str(error)
        _publish(settings, lambda lease: lease.publish_failed(instance, why))
        return EXIT_HOPELESS
    except Exception as error:
        log.exception("the worker could not start")
        why = f"{type(error).__name__}: {error}"
        _publish(settings, lambda lease: lease.publish_failed(instance, why))
        return 1
    return uvloop.run(_serve(settings, worker, ready))


def _publish(settings: WorkerSettings, write: Callable[[Lease], Awaitable[None]]) -> None:
    """Write one state over a short connection: loading blocks the loop and cannot keep one."""

    async def publish() -> None:
        bus = RedisBus(settings.redis_url)
        try:
            await write(Lease(bus, EngineKeys(settings.engine_id)))
        except BusUnavailable as error:
            log.warning("the worker's state was not published", error=error)
        finally:
            await bus.close()

    asyncio.run(publish())


async def _serve(settings: WorkerSettings, worker: Worker, ready: Callable[[], None]) -> int:
    metrics = WorkerMetrics(
        model_name(settings.model, settings.served_model_name), settings.engine_id
    )
    metrics.describe_kv(worker.executor.limits.kv.dtype, worker.pool_bytes)
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
        ready=ready,
        thread=compute_thread(executor.device),
        premapper=premapper(executor),
        pipeline=None if waiting is None else executor,
        waiting=waiting,
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, service.stop)
    prefaulting = asyncio.create_task(_prefault_pool(executor, service))
    try:
        await service.run()
    except Exception:
        log.exception("a step failed")
        return 1
    finally:
        await cancel_until_done(prefaulting)
        await bus.close()
    return 0


async def _prefault_pool(executor: Executor, service: WorkerService) -> None:
    """Take the memory of a pool on the CPU while no step is under way."""
    if executor.device.type == "cpu":
        await prefault(executor.memory.layers.values(), lambda: service.is_computing)
