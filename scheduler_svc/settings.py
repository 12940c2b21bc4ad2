"""Settings of the scheduler."""

from dataclasses import dataclass

from shared.errors import SettingsError
from shared.service_settings import StepSettings
from shared.settings import setting


@dataclass(frozen=True, slots=True)
class SchedulerSettings(StepSettings):
    """Settings of one scheduler process."""

    max_plans_in_flight: int = setting(
        2, "Plans that may be appended before their results have been read.", minimum=1, maximum=8
    )
    prefill_pause: float = setting(
        0.25,
        "Seconds that prompts may add to a step in which other sequences decode, at the speed that "
        "the worker measured at start. 0: no limit.",
        minimum=0,
    )
    watermark: float = setting(
        0.01, "Share of the blocks kept free when requests are admitted.", minimum=0, maximum=0.5
    )
    prefix_caching: bool = setting(
        True, "Keep KV blocks that are not in use for later requests with the same beginning."
    )
    prefix_sharing: str = setting(
        "tenant",
        "Which requests share cached prefixes: tenant, those with the same API key; all, any. All "
        "requests share pinned prefixes.",
        choices=("tenant", "all"),
    )
    max_pinned_share: float = setting(
        0.5,
        "Share of the blocks that pinned prefixes may keep (the gateway's --pinned-prefixes).",
        minimum=0,
        maximum=0.5,
    )
    max_passing_steps: int = setting(
        256,
        "Steps in which later requests may start before a request of many choices or beams, which "
        "waits until as many sequences are free at once. After them, free sequences are reserved "
        "for it. 0: later requests always wait.",
        minimum=0,
    )
    preemption: str = setting(
        "auto",
        "How preempted requests continue; auto takes the cheaper way by speeds measured at start.",
        choices=("recompute", "swap", "auto"),
    )
    outputs_retention: int = setting(
        10_000, "Entries of the outputs log kept for slow readers.", minimum=100
    )
    outputs_retention_bytes: int = setting(
        64 << 20,
        "Most bytes in these entries; log-probabilities make entries large. Entries that "
        "unfinished requests need are kept in addition.",
        minimum=1 << 20,
    )
    plans_retention: int = setting(
        10_000,
        "Plans kept after their steps, from which the page shows the past. 0: none, and the page "
        "shows no blocks.",
        minimum=0,
    )
    plans_retention_bytes: int = setting(
        16 << 20,
        "Most bytes in these plans; a plan has the prompts of the requests that it admits. The "
        "snapshots of the pool between them have as much in addition.",
        minimum=1 << 20,
    )
    max_waiting_requests: int = setting(
        10_000, "Most requests in the queue; more are refused (429). 0: no limit.", minimum=0
    )
    max_waiting_tokens: int = setting(
        20_000_000,
        "Most prompt tokens in the queue; 4 characters of a grammar count as one. 0: no limit.",
        minimum=0,
    )
    max_tenant_requests: int = setting(
        0, "Most requests of one API key in the queue. 0: no limit.", minimum=0
    )
    max_tenant_tokens: int = setting(
        0, "Most prompt tokens of one API key in the queue. 0: no limit.", minimum=0
    )
    max_tenant_sequences: int = setting(
        0,
        "Most sequences of one API key that run at once; its other requests wait while those of "
        "other keys start. 0: no limit.",
        minimum=0,
    )
    fair_queueing: bool = setting(
        True,
        "Serve API keys by the tokens that each of them was served: the requests of the one with "
        "the fewest start first, and a key without running requests displaces one of the key that "
        "has most. Without it, requests start in the order of their arrival.",
    )
    max_tenant_slowdown: float = setting(
        1.5,
        "How many times as long a step may take, because of an API key with many running "
        "sequences, as if each key had as many as the one with the fewest; the others of the first "
        "key wait meanwhile. By times that the worker measured at start. 0: no limit.",
        minimum=0,
    )
    prompt_token_weight: float = setting(
        1.0, "What a prompt token counts for that, unless it is in the prefix cache.", minimum=0
    )
    generated_token_weight: float = setting(2.0, "What a generated token counts.", minimum=0)
    queue_ttl: float = setting(
        0.0,
        "Seconds that a request may wait in the queue before it is ended. 0: no limit.",
        minimum=0,
    )
    resume_window: float = setting(
        60.0, "Seconds for which a request that has ended can be resumed.", minimum=0
    )
    gateway_grace: float = setting(
        60.0, "Seconds after which the requests of a gateway that has died are ended.", minimum=1
    )
    worker_patience: float = setting(
        120.0,
        "Seconds for which a worker that was ready once and cannot start any more (for example "
        "because its model's folder is missing) is restarted; then the engine has failed, and open "
        "requests end with an error.",
        minimum=0,
    )
    drain_timeout: float = setting(
        30.0,
        "Seconds that running requests may take to end when the scheduler is stopped.",
        minimum=0,
    )
    advertised_redis_url: str | None = setting(
        None,
        "URL of the engine's Redis for the gateways of a fleet; auto: that of --redis-url.",
    )
    record: str | None = setting(
        None, "File to which the input of the scheduler is appended, for a replay; auto: none."
    )
    scheduler_metrics_host: str = setting("127.0.0.1", "Address of the scheduler's /metrics.")
    scheduler_metrics_port: int = setting(
        9101, "Port of the scheduler's /metrics; 0 for none.", minimum=0, maximum=65535
    )

    def __post_init__(self) -> None:
        if 0 < self.max_tenant_slowdown < 1:
            raise SettingsError(
                "--max-tenant-slowdown", self.max_tenant_slowdown, "must be 0 or at least 1"
            )
        if self.max_num_batched_tokens < self.max_num_sequences:
            raise SettingsError(
                "--max-num-batched-tokens",
                self.max_num_batched_tokens,
                f"must be at least --max-num-sequences, which is {self.max_num_sequences}: every "
                "running sequence needs a token in each step",
            )
