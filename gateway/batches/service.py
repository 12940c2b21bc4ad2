"""Files and batches of one gateway, and the task that works on batches."""

import json
import secrets
import time

from gateway.batches.batch_jobs import BatchJobs
from gateway.batches.batch_run import BatchLimits, LinePlaces
from gateway.batches.body import BatchBody
from gateway.batches.line_requests import LineRequests
from gateway.batches.records import ENDED, BatchState, Status
from gateway.batches.store import BatchStore
from gateway.files.records import FOR_BATCH
from gateway.files.store import NEXT_TO_NOTHING_BYTES, FileStore, new_file_id
from gateway.http.errors import files_full, invalid_value
from gateway.jobs.dispatcher import Dispatcher
from gateway.responses.service import Responses
from gateway.service import Service
from gateway.settings import GatewaySettings
from shared.bus.api import Bus
from shared.bus.keys import EngineKeys


class Batches:
    """What the endpoints of files and batches share."""

    def __init__(
        self, service: Service, responses: Responses, bus: Bus, settings: GatewaySettings
    ) -> None:
        self.files = FileStore(
            bus,
            EngineKeys(settings.engine_id),
            settings.batch_retention,
            settings.batch_bytes,
            settings.batch_file_bytes,
        )
        self.store = BatchStore(self.files)
        self._instance = service.instance
        limits = BatchLimits(LinePlaces(settings.batch_concurrency), settings.batch_lines)
        requests = LineRequests(service, responses)
        jobs = BatchJobs(service, requests, self.store, settings.batches_queued, limits)
        self._dispatcher = Dispatcher(service, bus, jobs)

    async def create(self, body: BatchBody, tenant: str) -> BatchState:
        """A new batch, which this gateway works on.

        Raises:
            ApiError: 400, 404 or 429.
        """
        window_s = body.window_s
        self._dispatcher.check_room(tenant)
        info = await self.files.find(body.input_file_id, tenant, "input_file_id")
        if info.purpose != FOR_BATCH:
            reason = f"the purpose of this file is {info.purpose!r}, not {FOR_BATCH!r}"
            raise invalid_value("input_file_id", info.id, reason)
        if not await self.files.kept.has_room(tenant, NEXT_TO_NOTHING_BYTES):
            raise files_full(self.files.kept.limit)
        retention_s = self.files.retention_s
        if body.output_expires_after is not None:
            retention_s = min(retention_s, body.output_expires_after.seconds)
        now_s = int(time.time())
        state = BatchState(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=tenant,
            endpoint=body.endpoint,
            input_file=info.id,
            output_file=new_file_id(),
            error_file=new_file_id(),
            window=body.completion_window,
            metadata=json.dumps(body.metadata),
            created_s=now_s,
            expires_s=now_s + window_s,
            retention_s=int(retention_s),
        )
        await self.files.keep_until(info, state.expires_s + retention_s)
        log = await self.store.begin(state, self._instance)
        await self._dispatcher.begin(log, tenant)
        return state

    async def cancel(self, batch_id: str, tenant: str) -> BatchState:
        """End a batch; what was answered until then is kept.

        Raises:
            ApiError: 404, or 400 if it has ended otherwise.
        """
        state = await self.store.find(batch_id, tenant)
        if state.status in (Status.VALIDATING, Status.IN_PROGRESS):
            log = await self.store.cancel(batch_id, self._instance)
            if log is not None:
                self._dispatcher.take(log)
            state = await self.store.find(batch_id, tenant)
        if state.status in ENDED and state.status != Status.CANCELLED:
            raise invalid_value("batch_id", batch_id, f"this batch is {state.status} already")
        return state

    async def run(self) -> None:
        """Work on batches until cancelled."""
        await self._dispatcher.run()
