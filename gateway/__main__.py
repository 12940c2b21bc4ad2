"""``python -m gateway``: reads the settings, loads the tokenizer, then serves."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvloop

from gateway.http.server import Server, handle_signals
from gateway.openai.requests.model_defaults import read_model_defaults
from gateway.settings import GatewaySettings
from gateway.text.memory_release import limit_free_memory
from gateway.text.tokenizer import Tokenizer
from gateway.unserved import serve_unserved
from shared.bus.redis_bus import RedisBus
from shared.cpu_priority import never_preempt_others
from shared.errors import BusUnavailable, ModelUnsupported, SettingsError
from shared.logs import EventLog, setup_logging
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
    settings: GatewaySettings,
    tokenizer: Tokenizer,
    defaults: Mapping[str, Any],
    ready: Callable[[], None],
) -> int:
    bus = RedisBus(settings.redis_url)
    try:
        _log.info("connected to Redis", version=await bus.check_server())
        for warning in await bus.settings_warnings():
            _log.warning(warning)
    except BusUnavailable as error:
        # The server keeps trying to connect, and is not ready until then.
        _log.warning("starting without Redis", error=error)
    directory = None if settings.directory_url is None else RedisBus(settings.directory_url)
    try:
        server = Server(settings, bus, tokenizer, defaults, directory)
        handle_signals(server)
        return await server.run(ready)
    finally:
        await bus.close()
        if directory is not None:
            await directory.close()


def prepare() -> None:
    """Read the settings, set up logs, import what tokenizers need; exits with 2 on bad settings."""
    _settings()
    with _without_torch():
        Tokenizer.preload()


def main(ready: Callable[[], None] = lambda: None) -> int:
    """Load the tokenizer and serve; return the exit status of the process.

    Args:
        ready: called when connections are accepted.
    """
    settings = _settings()
    limit_free_memory()
    never_preempt_others()
    try:
        with _without_torch():
            tokenizer = Tokenizer.load(
                settings.model, settings.trust_remote_code, settings.special_tokens_in_messages
            )
            defaults = _defaults(settings)
    except ModelUnsupported as error:
        _log.error("cannot serve", error=error)
        serving = serve_unserved(settings, str(error))
    else:
        serving = _serve(settings, tokenizer, defaults, ready)
    try:
        return uvloop.run(serving)
    except SettingsError as error:
        exit_with(error)


def _defaults(settings: GatewaySettings) -> Mapping[str, Any]:
    """The model's sampling defaults; exits with 2 if they cannot be used."""
    if settings.generation_config == "none":
        return {}
    try:
        found = read_model_defaults(settings.model)
    except SettingsError as error:
        exit_with(error)
    _log.info("sampling defaults of the model", **found)
    return found


def _settings() -> GatewaySettings:
    settings = load_or_exit(GatewaySettings, "PageStream's gateway: the OpenAI API over Redis.")
    setup_logging("gateway", settings.log_level)
    return settings


if __name__ == "__main__":
    sys.exit(main())
