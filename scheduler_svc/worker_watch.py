"""The worker's lease as a scheduler sees it."""

from dataclasses import dataclass

from shared.bus.api import Bus
from shared.bus.keys import EngineKeys
from shared.codec import decode_as
from shared.errors import DecodeError
from shared.messages.leases import EngineState, WorkerInfo, WorkerState, why_incompatible


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """One look at the lease.

    Attributes:
        lease: None where there is none, or none that can be used.
        state: of the engine, as far as the worker decides about it.
        detail: why the engine is not ready; "" if the worker is.
    """

    lease: WorkerInfo | None
    state: EngineState
    detail: str


async def look_at_worker(bus: Bus, keys: EngineKeys) -> WorkerLook:
    """Read the lease of rank 0.

    Raises:
        BusUnavailable: the server does not answer.
    """
    value = await bus.get(keys.worker(0))
    if value is None:
        return WorkerLook(None, EngineState.STARTING, "no worker is ready")
    try:
        lease: WorkerInfo = decode_as(WorkerInfo, value)
    except DecodeError as error:
        detail = f"the worker's lease is unreadable, perhaps of another version: {error}"
        return WorkerLook(None, EngineState.FAILED, detail)
    if (why := why_incompatible("worker", lease.protocol)) is not None:
        return WorkerLook(None, EngineState.FAILED, why)
    if lease.state == WorkerState.READY:
        return WorkerLook(lease, EngineState.READY, "")
    if lease.state == WorkerState.FAILED:
        return WorkerLook(lease, EngineState.FAILED, lease.detail)
    return WorkerLook(lease, EngineState.STARTING, "no worker is ready")
