"""``python -m gateway``: reads the settings, loads the model's tokenizer, then serves."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvloop

from gateway.http.server import Server, handle_signals
from gateway.models.model_files import ModelFiles
from gateway.settings import GatewaySettings
from gateway.text.memory_release import limit_free_memory
from gateway.text.tokenizer import Tokenizer
from gateway.unserved import serve_unserved
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.cpu_priority import never_preempt_others
from shared.errors import BusUnavailable, ModelUnsupported, SettingsError
from shared.logs import EventLog, setup_logging
from shared.model_name import model_name
from shared.settings import exit_with, load_or_exit

_log = EventLog("gateway")


@contextmanager
def _without_torch() -> Iterator[None]:
    """Keep transformers from importing torch, which may be installed for other services.

    A gateway needs only the tokenizer, and torch costs seconds and hundreds of megabytes.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that torch is missing
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


async def _serve(
    settings: GatewaySettings, files: ModelFiles | None, ready: Callable[[], None]
) -> int:
    """Serve one engine's model; without ``files``, those of the directory."""
    if settings.directory_url is None:
        bus = RedisBus.of_engine(settings.redis_url, settings.engine_id)
    else:
        # What gateways keep of answers and files is there, by the keys of this engine id.
        bus = RedisBus.of_directory(settings.directory_url, EngineKeys(settings.engine_id).info)
    try:
        _log.info("connected to Redis", version=await bus.check_server())
        for warning in await bus.settings_warnings():
            _log.warning(warning)
    except BusUnavailable as error:
        # The server keeps trying to connect, and is not ready until then.
        _log.warning("starting without Redis", error=error)
    try:
        server = Server(settings, bus, files, None if files is not None else bus)
        handle_signals(server)
        return await server.run(ready)
    finally:
        await bus.close()


def prepare() -> None:
    """Read the settings, set up logs, import what tokenizers need; exits with 2 on bad settings."""
    _settings()
    with _without_torch():
        Tokenizer.preload()


def main(ready: Callable[[], None] = lambda: None) -> int:
    """Load the model's tokenizer and serve; return the exit status of the process.

    The models of a fleet are loaded when their engines appear.

    Args:
        ready: called when connections are accepted.
    """
    settings = _settings()
    limit_free_memory()
    never_preempt_others()
    with _without_torch():
        try:
            try:
                serving = _serve(settings, _files(settings), ready)
            except ModelUnsupported as error:
                _log.error("cannot serve", error=error)
                serving = serve_unserved(settings, str(error))
            return uvloop.run(serving)
        except SettingsError as error:
            exit_with(error)


def _files(settings: GatewaySettings) -> ModelFiles | None:
    """The files of the only model; None: there is a fleet."""
    if settings.directory_url is not None:
        return None
    name = model_name(settings.model, settings.served_model_name)
    return ModelFiles.read(name, settings.model, settings)


def _settings() -> GatewaySettings:
    settings = load_or_exit(GatewaySettings, "PageStream's gateway: the OpenAI API over Redis.")
    setup_logging("gateway", settings.log_level)
    return settings


if __name__ == "__main__":
    sys.exit(main())
