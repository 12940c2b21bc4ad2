"""The worker as a process: its signals, its states on the bus, its exit codes."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from uuid import uuid4

import uvloop

from gpu_worker.kv.prefault import prefault
from gpu_worker.lease import Lease
from gpu_worker.model.loader import choose_device
from gpu_worker.observer import Observer
from gpu_worker.ranks.formation import form_group
from gpu_worker.ranks.member import GroupOver, Member, this_parent
from gpu_worker.ranks.ranked_executor import RankedExecutor
from gpu_worker.ranks.ranks import Ranks, connect
from gpu_worker.ranks.step_watch import StepWatch
from gpu_worker.ranks.tcp_rendezvous import TcpRendezvous
from gpu_worker.service import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from gpu_worker.step.compute_thread import compute_thread, premapper, waiting_thread
from gpu_worker.step.executor import Executor
from gpu_worker.step.plan_executor import PlanExecutor
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
    member = _member(settings)
    ranks: Ranks | None = None
    try:
        if member.is_alone:
            _publish(settings, member, lambda lease: lease.publish_loading(instance))
        else:
            ranks = _join_group(settings, member, instance)
            member = ranks.member
        worker = build_worker(settings, ranks=ranks)
    except GroupOver as error:
        log.warning("group over", reason=error)
        return 1
    except (ModelUnsupported, SettingsError) as error:
        log.error("this model cannot be served", reason=error)
        why = str(error)
        _publish(settings, member, lambda lease: lease.publish_failed(instance, why))
        return EXIT_HOPELESS
    except Exception as error:
        log.exception("the worker could not start")
        why = f"{type(error).__name__}: {error}"
        _publish(settings, member, lambda lease: lease.publish_failed(instance, why))
        return 1
    try:
        return uvloop.run(_serve(settings, worker, ready, member, ranks))
    finally:
        if ranks is not None:
            ranks.collectives.close()


def _member(settings: WorkerSettings) -> Member:
    return Member(settings.rank, settings.tensor_parallel_size, parent=this_parent())


def _join_group(settings: WorkerSettings, member: Member, instance: str) -> Ranks:
    """Wait for the other ranks and connect to them.

    Raises:
        GroupOver: one of them does not connect.
        SettingsError: there is no such device.
    """
    device, host = choose_device(settings.device, settings.rank), settings.rank_host
    rendezvous = TcpRendezvous(member, host)

    async def form() -> Member:
        bus = RedisBus.of_engine(settings.redis_url, settings.engine_id)
        try:
            return await form_group(
                bus, EngineKeys(settings.engine_id), member, instance, rendezvous
            )
        finally:
            await bus.close()

    joined = asyncio.run(form())
    return connect(joined, rendezvous, host, device, settings.deterministic)


def _publish(
    settings: WorkerSettings, member: Member, write: Callable[[Lease], Awaitable[None]]
) -> None:
    """Write one state over a short connection: loading blocks the loop and cannot keep one."""

    async def publish() -> None:
        bus = RedisBus.of_engine(settings.redis_url, settings.engine_id)
        try:
            await write(Lease(bus, EngineKeys(settings.engine_id), member))
        except BusUnavailable as error:
            log.warning("the worker's state was not published", error=error)
        finally:
            await bus.close()

    asyncio.run(publish())


async def _serve(
    settings: WorkerSettings,
    worker: Worker,
    ready: Callable[[], None],
    member: Member,
    ranks: Ranks | None,
) -> int:
    metrics = WorkerMetrics(
        model_name(settings.model, settings.served_model_name), settings.engine_id
    )
    metrics.describe_kv(worker.executor.limits.kv.dtype, worker.pool_bytes)
    metrics.describe_weights(worker.kernels, worker.weight_bytes)
    metrics.serve(settings.worker_metrics_host, settings.worker_metrics_port)
    bus = RedisBus.of_engine(settings.redis_url, settings.engine_id)
    executor = worker.executor
    # Steps of several ranks do not overlap: all of them must end before the next one begins.
    waiting = waiting_thread(executor.device) if ranks is None else None
    plans: PlanExecutor = executor
    if ranks is not None:
        collectives, on_gpu = ranks.collectives, executor.device.type == "cuda"
        watch = StepWatch(collectives.close) if on_gpu else None
        plans = RankedExecutor(executor, collectives, ranks.failure, watch)
    service = WorkerService(
        bus,
        settings.engine_id,
        plans,
        worker.model,
        executor.limits.kv,
        worker.speeds,
        Observer(metrics, executor, (lambda: None) if ranks is None else ranks.sums_s),
        member,
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
    except GroupOver as error:
        log.warning("group over", reason=error)
        return 1
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
