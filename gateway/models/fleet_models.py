"""The models of a fleet: each is served while engines have it, or had it lately."""

import asyncio
import time
from collections.abc import Callable, Container, Mapping

from gateway.fleet.directory import Directory, Placement
from gateway.fleet.fleet import Fleet
from gateway.http.errors import unavailable
from gateway.models.file_loader import FileLoader
from gateway.models.model_files import ModelFiles
from gateway.models.model_table import ModelTable
from gateway.models.served_model import ServedModel
from gateway.resume.stream_context import read_display
from gateway.settings import GatewaySettings
from shared.errors import BusUnavailable, DecodeError
from shared.logs import EventLog
from shared.messages.leases import EngineInfo
from shared.metrics import GatewayMetrics, ModelMetrics

_log = EventLog("gateway.models.fleet_models")

_POLL_S = 0.5
_CLOSE_S = 60.0  # after which no call uses a model that has left: longer than any tokenization

MakeFleet = Callable[[ModelFiles, ModelMetrics], Fleet]
"""Makes the engines of a model from its files."""


class FleetModels(ModelTable):
    """Implements the table for a directory of engines.

    A model's files are read when its first engine appears, one model after the other. Without an
    engine it stays for ``--model-retention``, so that calls are answered 503 and not 404.

    Args:
        make_fleet: makes the engines of a model.
        loader: reads the files of models.
    """

    def __init__(
        self,
        directory: Directory,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        make_fleet: MakeFleet,
        loader: FileLoader,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.why_empty = "the directory of engines was not read yet"
        self._directory = directory
        self._settings = settings
        self._metrics = metrics
        self._make_fleet = make_fleet
        self._loader = loader
        self._clock_s = clock_s
        self._fleets: dict[str, Fleet] = {}  # by model
        self._refused: set[str] = set()  # models beyond the limit
        self._left: list[tuple[float, ServedModel]] = []  # that will be closed
        self._engines: set[str] = set()  # with a lease
        self._memory_share = 0.0
        self._first_read_s: float | None = None

    def why_away(self, name: str) -> str | None:
        """While its files are read, or cannot be; or while the directory was not read."""
        if name in self._refused:
            return f"the model {name!r} is one too many: --max-models={self._settings.max_models}"
        unread = self.why_empty if self._first_read_s is None else None
        return self._loader.why_not(name) or unread

    def kept(self, name: str) -> ServedModel:
        """The model by this name."""
        found = self.find(name)
        if found is None:
            why = self.why_away(name)
            raise unavailable(why or f"no engine of the fleet serves its model, {name!r}")
        return found

    async def owner(self, request_id: str) -> ServedModel | None:
        """The model of the engine at which the request is placed, or that the directory keeps."""
        try:
            placement = await self._directory.find(request_id)
            if placement is None:
                return None
            found = self._model_at(placement) or await self._model_of_kept(request_id)
        except (BusUnavailable, DecodeError) as error:
            raise unavailable(f"the directory does not answer: {error}") from error
        if found is None and self._may_come(placement.engine_id):
            raise unavailable(f"its engine, {placement.engine_id!r}, is away")
        return found

    async def is_of_other(self, request_id: str, model: ServedModel) -> bool:
        """Whether an engine of another model has it."""
        try:
            placement = await self._directory.find(request_id)
        except (BusUnavailable, DecodeError):
            return False  # whoever attaches to it fails
        return placement is not None and self._model_at(placement) not in (None, model)

    @property
    def memory_share(self) -> float:
        """That of the directory."""
        return self._memory_share

    async def run(self) -> None:
        """Read the directory until cancelled, and follow what it lists."""
        try:
            while True:
                await self._poll()
                await asyncio.sleep(_POLL_S)
        finally:
            await self._loader.close()
            for fleet in self._fleets.values():
                await fleet.end()

    def close(self) -> None:
        """Stop the threads and processes of all models."""
        super().close()
        for _, model in self._left:
            model.close()

    # ------------------------------------------------------------------- poll

    async def _poll(self) -> None:
        try:
            leases = await self._directory.engines()
            self._memory_share = await self._directory.memory_share()
            for fleet in self._fleets.values():
                await fleet.renew(self._memory_share)
        except BusUnavailable as error:
            why = f"the directory does not answer: {error}"
            if self.why_empty != why:
                _log.warning("directory not read", error=error)
            self.why_empty = why
            for fleet in self._fleets.values():
                fleet.directory_failed(why)
            return
        if self._first_read_s is None:
            self._first_read_s = self._clock_s()
        unreadable = next(iter(self._directory.unreadable.values()), None)
        self.why_empty = self._loader.why_any() or unreadable or "the fleet has no engine"
        await self._take(leases)
        self._close_left()

    async def _take(self, leases: Mapping[str, EngineInfo]) -> None:
        """Follow the leases: models come, their engines change, and models leave."""
        self._engines = set(leases)
        nameless = {one: info for one, info in leases.items() if info.model is None}
        by_model: dict[str, dict[str, EngineInfo]] = {}
        for engine_id, info in leases.items():
            if info.model is not None:
                by_model.setdefault(info.model.name, {})[engine_id] = info
        self._refused &= by_model.keys()
        for name, own in by_model.items():
            if name not in self._fleets and await self._has_room_for(name, by_model):
                roots = [info.model.root for info in own.values() if info.model is not None]
                files = self._loader.take(name, roots)
                if files is not None:
                    self._add(files)
        self._loader.forget_others(by_model)
        for name, fleet in list(self._fleets.items()):
            await fleet.update(nameless | by_model.get(name, {}))
            if not fleet.seen_s:
                await self._remove(name)

    async def _has_room_for(self, name: str, with_engines: Container[str]) -> bool:
        """Whether one more model can be served, if need be in place of one without an engine."""
        most = self._settings.max_models
        if len(self._fleets.keys() | self._loader.names | {name}) > most:
            away = (one for one in self._fleets if one not in with_engines)
            idle = next((one for one in away if not self._fleets[one].num_open), None)
            if idle is None:
                if name not in self._refused:
                    self._refused.add(name)
                    _log.error("model not served", model=name, reason=f"--max-models={most}")
                return False
            await self._remove(idle)
        self._refused.discard(name)
        return True

    def _add(self, files: ModelFiles) -> None:
        metrics = self._metrics.of_model(files.name)
        fleet = self._make_fleet(files, metrics)
        self._fleets[files.name] = fleet
        self._served[files.name] = ServedModel.of(files, fleet, metrics, self._settings)
        _log.info("model joined", model=files.name, root=files.root)

    async def _remove(self, name: str) -> None:
        fleet, model = self._fleets.pop(name), self._served.pop(name)
        _log.info("model left", model=name)
        await fleet.end()
        self._left.append((self._clock_s() + _CLOSE_S, model))

    def _close_left(self) -> None:
        now_s = self._clock_s()
        while self._left and self._left[0][0] <= now_s:
            _, model = self._left.pop(0)
            model.close()
            if model.name not in self._served:
                model.metrics.forget()

    # ---------------------------------------------------------------- helpers

    def _model_at(self, placement: Placement) -> ServedModel | None:
        """The model that an engine has; the last one, if it had several."""
        seen = {name: fleet.seen_s.get(placement.engine_id) for name, fleet in self._fleets.items()}
        times = {name: seen_s for name, seen_s in seen.items() if seen_s is not None}
        return self._served[max(times, key=times.__getitem__)] if times else None

    async def _model_of_kept(self, request_id: str) -> ServedModel | None:
        """The model of a request that its engine and its gateway have lost."""
        submit = await self._directory.kept(request_id)
        display = None if submit is None else read_display(submit.display)
        return None if display is None else self.find(display.model)

    def _may_come(self, engine_id: str) -> bool:
        """Whether an engine that no model has here was not away for the whole retention time."""
        if self._first_read_s is None or engine_id in self._engines:
            return True
        return self._clock_s() - self._first_read_s < self._settings.model_retention
