"""Makes the table of a gateway's models: that of one engine, or that of a fleet."""

import time
from collections.abc import Callable
from functools import partial

from gateway.engine.client import EngineClient
from gateway.fleet.directory import Directory
from gateway.fleet.fleet import Fleet
from gateway.models.file_loader import FileLoader
from gateway.models.fleet_models import FleetModels
from gateway.models.model_files import ModelFiles
from gateway.models.model_table import ModelTable, OneModel
from gateway.models.served_model import ServedModel
from gateway.settings import GatewaySettings
from gateway.tracing.phases import PhaseTracker
from gateway.tracing.tracer import Tracer
from shared.bus.api import Bus
from shared.bus.redis_bus import RedisBus
from shared.metrics import GatewayMetrics, ModelMetrics


def model_table(
    settings: GatewaySettings,
    bus: Bus,
    files: ModelFiles | None,
    directory: Bus | None,
    instance: str,
    metrics: GatewayMetrics,
    tracer: Tracer | None,
) -> ModelTable:
    """The table of the directory's models; without a directory, of the model of ``files``.

    Args:
        bus: of the engine, if there is no directory.
        instance: names this gateway in logs.
    """

    def client(
        files: ModelFiles,
        metrics: ModelMetrics,
        bus: Bus,
        engine_id: str,
        on_released: Callable[[str], None] | None = None,
    ) -> EngineClient:
        phases = None
        if tracer is not None:
            phases = PhaseTracker(engine_id, files.name, tracer.record, time.time_ns)
        return EngineClient(
            *(bus, engine_id, files.name, instance, metrics, files.prefixes),
            *(settings.bus_patience, phases, on_released),
        )

    if directory is None:
        assert files is not None, "a gateway has a model or a directory"
        own = metrics.of_model(files.name)
        engine = client(files, own, bus, settings.engine_id)
        return OneModel(ServedModel.of(files, engine, own, settings), engine)
    engines = Directory(directory)

    def fleet(files: ModelFiles, metrics: ModelMetrics) -> Fleet:
        return Fleet(
            engines,
            files.name,
            metrics,
            RedisBus.of_engine,
            partial(client, files, metrics),
            settings.bus_patience,
            settings.engine_patience,
            settings.model_retention,
            files.prefixes,
            settings.resume_window,
        )

    loader = FileLoader(settings, lambda name, root: ModelFiles.read(name, root, settings))
    return FleetModels(engines, settings, metrics, fleet, loader)
