"""Responses of one gateway: their store, and the task that finishes those in the background."""

from gateway.jobs.dispatcher import Dispatcher
from gateway.responses.background_jobs import BackgroundJobs
from gateway.responses.records import ResponseAsked
from gateway.responses.response_stream import ResponseStream
from gateway.responses.store import ResponseStore
from gateway.responses.views import ResponseViews
from gateway.service import Service
from gateway.settings import GatewaySettings
from shared.bus.api import Bus
from shared.bus.keys import EngineKeys


class Responses:
    """What the endpoints of responses share."""

    def __init__(self, service: Service, bus: Bus, settings: GatewaySettings) -> None:
        self.store = ResponseStore(
            bus,
            EngineKeys(settings.engine_id),
            settings.responses_retention,
            settings.responses_bytes,
        )
        self.views = ResponseViews(service.models)
        jobs = BackgroundJobs(service, self.store, settings.responses_queued)
        self.dispatcher = Dispatcher(service, bus, jobs)
        self._instance = service.instance
        self._patience_s = settings.bus_patience

    async def begin(self, asked: ResponseAsked) -> None:
        """Queue a response and run it here; nothing happens if there is one of this id."""
        log = await self.store.begin(asked, self._instance)
        if log is not None:
            await self.dispatcher.begin(log, asked.tenant)

    def stream(self, response_id: str, after: int) -> ResponseStream:
        """The events of a response after one that the client has; -1: all."""
        return ResponseStream(self.store, self.views, response_id, after, self._patience_s)

    async def run(self) -> None:
        """Finish responses in the background until cancelled."""
        await self.dispatcher.run()
