"""Settings of the gateway."""

import re
from dataclasses import dataclass
from pathlib import Path

from gateway.access.networks import networks_of
from gateway.access.priorities import PriorityRange
from gateway.answers.parser_names import AUTO, CALL_CHOICES, REASONING_CHOICES
from shared.service_settings import ServiceSettings
from shared.settings import byte_size, setting

_COLLECTOR = re.compile(r"https?://[^/\s?#]+(/[^\s?#]*)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*?#@]+")


def _origins(text: str) -> str:
    found = [origin.strip() for origin in text.split(",")]
    for origin in found:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            example = "https://chat.example.org or http://localhost:3000"
            raise ValueError(f"{origin!r} is no origin; expected one such as {example}, or *")
    return ",".join(found)


def _collector(text: str) -> str:
    if _COLLECTOR.fullmatch(text) is None:
        raise ValueError("expected the URL of a collector's OTLP over HTTP: http://HOST:4318")
    return text


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise ValueError("expected a folder that exists")
    return str(Path(text).resolve())


def checked_networks(text: str) -> str:
    """Returns a text such as ``10.0.0.0/8,::1`` if it is a list of addresses and networks.

    Raises:
        ValueError: it is not.
    """
    networks_of(text)
    return text


def checked_range(text: str) -> str:
    """Returns a text such as ``-10..10`` if it is a range of priorities.

    Raises:
        ValueError: it is not.
    """
    PriorityRange.parse(text)
    return text


@dataclass(frozen=True, slots=True)
class GatewaySettings(ServiceSettings):
    """Settings of one gateway process."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on.", minimum=0, maximum=65535)
    api_keys: str | None = setting(
        None,
        "File of the API keys that clients need, one NAME sha256:HEX in each line, read again on "
        "SIGHUP; python -m gateway.access.api_keys makes them. A single key can be given in the "
        "variable PAGESTREAM_API_KEY. With neither, clients need none.",
    )
    api_key: str | None = setting(None, "One API key, in plain text.", secret=True)
    metrics_key: str | None = setting(
        None,
        "Key of /metrics on --port, in plain text, required there instead of a client's API key. "
        "It is valid for nothing else.",
        secret=True,
    )
    cors_origins: str | None = setting(
        None,
        "Origins whose pages may call this gateway from a browser, such as "
        "https://chat.example.org, separated by commas, or * for all; auto allows none.",
        parse=_origins,
    )
    ui: bool = setting(
        True,
        "Serve the page for browsers at /: a chat. Its files need no API key; its calls do.",
    )
    ui_recordings: str | None = setting(
        None,
        "Folder of recordings (--record of the scheduler) that the page's time machine can open; "
        "every client with an API key may see what it shows of them. auto: none.",
        parse=_folder,
    )
    otlp_endpoint: str | None = setting(
        None,
        "Collector to which spans of traces are sent, OTLP over HTTP, such as "
        "http://127.0.0.1:4318; auto sends none. OpenTelemetry's own variables apply, such as "
        "OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS.",
        parse=_collector,
    )
    priorities: str | None = setting(
        None,
        "Priorities that requests may have, LOW..HIGH, or none for the default one alone; write "
        "--priorities=-10..10. A line in the file of API keys can allow others with "
        "priority=LOW..HIGH. By default none with API keys, and any without.",
        parse=checked_range,
    )
    gateway_metrics_host: str = setting("127.0.0.1", "Address of the gateway's own /metrics.")
    gateway_metrics_port: int = setting(
        0,
        "Port on which the gateway answers /metrics and /health/* without an API key; 0 for none. "
        "They are on --port as well, where /health and /health/live need no key.",
        minimum=0,
        maximum=65535,
    )
    max_concurrent_calls: int = setting(
        1024, "Most calls in progress at once; others are answered 429.", minimum=1
    )
    max_connections: int = setting(
        4096,
        "Most open connections. Beyond it, a new one replaces the one that has been idle longest; "
        "if none is idle, new ones are answered 503.",
        minimum=16,
    )
    max_address_connections: int | None = setting(
        None,
        "Most open connections from one address (IPv6: from one /64); beyond it, a new one "
        "replaces an idle one of them, or is answered 429. By default a quarter of "
        "--max-connections.",
        minimum=1,
    )
    trusted_proxies: str = setting(
        "127.0.0.0/8,::1",
        "Addresses and networks of reverse proxies, separated by commas, or none: their "
        "connections are not limited by --max-address-connections, and their header "
        "X-Forwarded-For gives the address of the client.",
        parse=checked_networks,
    )
    max_head_bytes: int = setting(
        32 * 2**10, "Largest request line with headers.", parse=byte_size, minimum=1024
    )
    request_timeout: float = setting(
        60.0, "Seconds that a request may take to arrive, from its first byte.", minimum=0.05
    )
    write_timeout: float = setting(
        120.0,
        "Seconds that a client may leave an answer unread; then its connection is closed.",
        minimum=0.05,
    )
    max_body_bytes: int = setting(
        4 * 2**20, "Largest request body accepted.", parse=byte_size, minimum=1024
    )
    max_total_body_bytes: int = setting(
        512 * 2**20,
        "Most bytes in the request bodies of all calls in progress together; calls beyond it are "
        "answered 429.",
        parse=byte_size,
        minimum=1024,
    )
    max_tokenize_bytes: int = setting(
        2**20,
        "Largest request body of /tokenize and /detokenize.",
        parse=byte_size,
        minimum=1024,
    )
    max_total_tokenize_bytes: int = setting(
        8 * 2**20,
        "Most bytes in the request bodies of all calls of /tokenize and /detokenize in progress "
        "together.",
        parse=byte_size,
        minimum=1024,
    )
    max_key_share: float = setting(
        0.5,
        "Share of --max-concurrent-calls, --max-total-body-bytes and --max-total-tokenize-bytes "
        "that one API key may use if there are several keys.",
        minimum=0.001,
        maximum=1.0,
    )
    max_prompt_chars: int = setting(
        4 * 2**20, "Most characters of text in one call, prompts or messages.", minimum=1
    )
    max_prompts: int = setting(128, "Most prompts in one call.", minimum=1, maximum=10_000)
    max_choices: int = setting(
        1024, "Most choices in one call: prompts times n, or best_of.", minimum=1
    )
    pinned_prefixes: str | None = setting(
        None,
        "File of prompt beginnings whose keys and values stay in the KV cache, one JSON map in "
        "each line; auto pins none.",
    )
    drain_timeout: float = setting(
        30.0, "Seconds that open streams may take to end after SIGTERM.", minimum=0
    )
    engine_patience: float = setting(
        10.0,
        "Seconds without a sign of life, after which an engine of a fleet is lost and its requests "
        "go on in others.",
        minimum=1,
    )
    model_retention: float = setting(
        300.0,
        "Seconds for which a model of a fleet is served on after its last engine left: calls are "
        "answered 503 meanwhile, and 404 later.",
        minimum=1,
    )
    max_models: int = setting(
        32, "Most models of a fleet that this gateway serves.", minimum=1, maximum=1_000
    )
    bus_patience: float = setting(
        60.0,  # a process that is paused for half a minute causes no failure
        "Seconds that Redis may be unreachable before open requests fail, and that a new or "
        "resumed request waits for the engine's first answer. A request that the engine has "
        "accepted waits without a limit.",
        minimum=0,
    )
    resume_window: float = setting(
        60.0,
        "Seconds for which a resumable stream continues without its client.",
        minimum=0,
    )
    max_stall: float = setting(
        10.0,
        "Seconds without a step, while the engine has work, after which the gateway is not ready.",
        minimum=0.1,
    )
    max_log_lag: float = setting(
        10.0,
        "Seconds since the outputs log was last read to its end, while clients wait, after which "
        "the gateway is not ready.",
        minimum=2.0,
    )
    template_timeout: float = setting(
        2.0,
        "Seconds that the model's chat template may take for one conversation; then the call is "
        "answered 400.",
        minimum=0.05,
    )
    special_tokens_in_messages: bool = setting(
        False,
        "Encode names of special tokens in the messages of chats, such as <|im_start|>, as those "
        "tokens. By default they are plain text, so that no message can imitate another one.",
    )
    generation_config: str = setting(
        AUTO,
        "Sampling parameters that a request leaves out: auto takes temperature, top_p, top_k, "
        "min_p and repetition_penalty from the model's generation_config.json, none the API's "
        "defaults.",
        choices=(AUTO, "none"),
    )
    tool_call_parser: str = setting(
        AUTO,
        "Format in which the model writes tool calls: auto takes the response template of its "
        "tokenizer, or recognizes the format from its chat template; none refuses tools.",
        choices=CALL_CHOICES,
    )
    reasoning_parser: str = setting(
        AUTO,
        "Format in which the model marks its reasoning, which is returned apart from the answer: "
        "auto as for --tool-call-parser; none leaves it in the answer.",
        choices=REASONING_CHOICES,
    )
    responses_retention: float = setting(
        86_400.0, "Seconds for which a response of /v1/responses is kept after its end.", minimum=1
    )
    responses_bytes: int = setting(
        64 * 2**20,
        "Most bytes in Redis of the responses of one API key. Beyond it, requests with store=true "
        "are answered 429, and the responses to others are not kept.",
        parse=byte_size,
        minimum=0,
    )
    responses_queued: int = setting(
        100,
        "Most unfinished background responses of one API key; more are answered 429.",
        minimum=1,
    )
    batch_retention: float = setting(
        604_800.0,
        "Seconds for which files of /v1/files are kept after they came, and a batch of /v1/batches "
        "with its answers after its end.",
        minimum=60,
    )
    batch_bytes: int = setting(
        256 * 2**20,
        "Most bytes in Redis of the files and batches of one API key. Beyond it, files are "
        "refused (429), and the other lines of a batch are not answered.",
        parse=byte_size,
        minimum=0,
    )
    batch_file_bytes: int = setting(
        100 * 2**20, "Largest file of /v1/files.", parse=byte_size, minimum=1
    )
    batch_lines: int = setting(
        50_000, "Most lines in the file of a batch; longer ones fail.", minimum=1, maximum=1_000_000
    )
    batch_concurrency: int = setting(
        16,
        "Lines of batches that a gateway lets the engine answer at once, at the lowest priority.",
        minimum=1,
        maximum=10_000,
    )
    batches_queued: int = setting(
        20, "Most unfinished batches of one API key; more are answered 429.", minimum=1
    )
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model.")

    @property
    def requires_keys(self) -> bool:
        """Clients need an API key."""
        return self.api_keys is not None or self.api_key is not None
