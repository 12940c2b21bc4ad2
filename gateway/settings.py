"""Settings of the gateway."""

from dataclasses import dataclass

from shared.settings import byte_size, setting

DEMO_MODEL = "models/demo"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """HTTP in, tokens out."""

    model: str = setting(DEMO_MODEL, "Model to serve: a folder or a hub id.")
    served_model_name: str | None = setting(
        None, "Name that clients give; by default the last part of the model's path."
    )
    redis_url: str = setting("redis://127.0.0.1:6379/0", "Redis to use.", env="REDIS_URL")
    engine_id: str = setting("engine-0", "Engine to send requests to.")
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on.", minimum=0, maximum=65535)
    max_body_bytes: int = setting(
        4 * 2**20, "Largest request body accepted.", parse=byte_size, minimum=1024
    )
    max_prompts: int = setting(128, "Most prompts in one call.", minimum=1)
    pinned_prefixes: str | None = setting(
        None,
        "File of prompt beginnings whose keys and values stay in the KV cache, one JSON map in "
        "each line; auto pins none.",
    )
    drain_timeout: float = setting(
        30.0, "Seconds that open streams may take to end after SIGTERM.", minimum=0
    )
    bus_patience: float = setting(
        30.0,
        "Seconds that Redis may be away before open requests are given up.",
        minimum=0,
    )
    resume_window: float = setting(
        60.0,
        "Seconds that a stream which can be resumed goes on without its client.",
        minimum=0,
    )
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model.")
    log_level: str = setting(
        "info", "Least severe log lines.", choices=("debug", "info", "warning", "error")
    )
