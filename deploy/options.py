"""The launcher's options: the settings of all services, from flags and environment.

Everything is read and checked here, before any process starts. The services then read the same
values from the environment that the launcher makes for them.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.known_models import known_models
from deploy.settings import REPOSITORY, LauncherSettings
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.errors import ModelUnsupported, SettingsError
from shared.gguf.location import gguf_file_of
from shared.settings import SettingsParser, add_flags, check_environment, env_name, load
from shared.suggestions import did_you_mean

# The form of hub ids; anything else can only be a folder.
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_CLASSES = (LauncherSettings, GatewaySettings, SchedulerSettings, WorkerSettings)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the launcher and of all services.

    Attributes:
        environ: environment of the services: the launcher's own, with the values of flags.
        own_redis: whether the launcher starts a Redis, because no setting names one.
        given: names of the settings that a flag or a variable sets.
    """

    launcher: LauncherSettings
    gateway: GatewaySettings
    scheduler: SchedulerSettings
    worker: WorkerSettings
    environ: Mapping[str, str]
    own_redis: bool
    given: frozenset[str]


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Read settings from a command line and an environment; exits for ``--help`` and unknown flags.

    Raises:
        SettingsError: a variable is unknown, or a value is invalid.
    """
    flags = _parser().read(argv)
    check_environment(_CLASSES, environ)
    made = service_environ(flags, environ)
    fields = {field.name: field for cls in _CLASSES for field in dataclasses.fields(cls)}
    given = frozenset(name for name, field in fields.items() if made.get(env_name(field)))
    options = Options(
        launcher=load(LauncherSettings, flags, environ),
        gateway=load(GatewaySettings, flags, made),
        scheduler=load(SchedulerSettings, flags, made),
        worker=load(WorkerSettings, flags, made),
        environ=made,
        own_redis="redis_url" not in given,
        given=given,
    )
    if "redis_port" in given and not options.own_redis:
        port = options.launcher.redis_port
        raise SettingsError("--redis-port", port, "no Redis is started: REDIS_URL names one")
    return options


def service_environ(flags: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service, with the settings that were given as flags."""
    names = {field.name: env_name(field) for cls in _CLASSES for field in dataclasses.fields(cls)}
    made = dict(environ) | {names[name]: text for name, text in flags.items()}
    # Services run in the user's folder, so that relative paths in their settings work, and with a
    # module search path that this folder cannot shadow.
    path = environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in path if folder not in ("", str(REPOSITORY))]
    made["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *others])
    made["PYTHONSAFEPATH"] = "1"
    made["PYTHONUNBUFFERED"] = "1"
    return made


def find_model(model: str) -> str:
    """Absolute path of a model's folder or GGUF file: as given, in the repository, or a known one.

    Anything else must be a hub id, and is returned unchanged.

    Raises:
        SettingsError: it can only be a folder, and there is none; or it nearly is a known name.
    """
    for base in (Path.cwd(), REPOSITORY):
        folder = base / Path(model).expanduser()
        try:
            file = gguf_file_of(str(folder))
        except ModelUnsupported as error:
            raise SettingsError("--model", model, str(error)) from None
        if file is not None:
            return str(file)
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                reason = "the folder has neither config.json nor a GGUF file"
                raise SettingsError("--model", model, reason)
            return str(folder)
    known = known_models()
    if model in known:
        return str(known[model])
    names = " and ".join(known)
    if "/" not in model and (meant := did_you_mean(model, known)):
        reason = f"there is no such folder{meant} Known by name are {names}"
        raise SettingsError("--model", model, reason)
    if not _HUB_ID.fullmatch(model):
        reason = f"there is no such folder, and it is no hub id; known by name are {names}"
        raise SettingsError("--model", model, reason)
    return model


def _parser() -> SettingsParser:
    parser = SettingsParser(
        prog="scripts/serve",
        description="Serve a model on this machine: starts Redis, a scheduler, a worker and a "
        "gateway, restarts what dies, and drains on Ctrl-C. With --redis-url, that Redis is used "
        "instead. Every flag is also an environment variable (in brackets); the flag wins.",
    )
    seen: set[str] = set()
    for cls in _CLASSES:
        add_flags(parser, cls, seen)
    return parser
