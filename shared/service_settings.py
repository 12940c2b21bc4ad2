"""Settings that every service has."""

from dataclasses import dataclass

from shared.settings import setting

DEMO_MODEL = "models/demo"


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings that gateway, scheduler and worker of one engine must share."""

    model: str = setting(
        DEMO_MODEL,
        "Model to serve: a folder or a hub id. scripts/serve also takes the names demo and "
        "smollm2; the latter answers questions and is made from a package of 93 MB at its first "
        "use.",
    )
    served_model_name: str | None = setting(
        None, "Name of the model for clients; by default the last part of its path."
    )
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "URL of Redis, of Sentinels (redis+sentinel://host:port,host:port/service), or of nodes of "
        "a Redis Cluster (redis+cluster://host:port,host:port).",
        env="REDIS_URL",
    )
    directory_url: str | None = setting(
        None,
        "URL of the Redis, as for --redis-url, with the directory of a fleet: schedulers enter "
        "their engines there, and gateways serve all engines with their model that are in it. "
        "auto: there is no fleet, and gateways serve the engine --engine-id.",
    )
    engine_id: str = setting("engine-0", "Name of the engine, which prefixes its keys in Redis.")
    log_level: str = setting(
        "info", "Least severe level that is logged.", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, slots=True)
class StepSettings(ServiceSettings):
    """Settings that scheduler and worker of one engine must share."""

    max_num_sequences: int = setting(
        256, "Sequences that may run at once.", minimum=1, maximum=65_536
    )
    max_num_batched_tokens: int = setting(
        512, "Most tokens in one step; long prompts are cut into chunks.", minimum=1
    )
