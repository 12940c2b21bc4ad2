"""Settings of the scheduler."""

from dataclasses import dataclass

from shared.errors import SettingsError
from shared.service_settings import StepSettings
from shared.settings import setting


@dataclass(frozen=True, slots=True)
class SchedulerSettings(StepSettings):
    """Who runs when, and on which blocks."""

    max_plans_in_flight: int = setting(
        2, "Plans that may be queued before their results are in.", minimum=1, maximum=8
    )
    prefill_pause: float = setting(
        0.25,
        "Seconds by which prompts may lengthen a step in which others decode, at the speed that "
        "the worker measured at start; 0: any number.",
        minimum=0,
    )
    watermark: float = setting(
        0.01, "Share of the blocks kept free when requests are admitted.", minimum=0, maximum=0.5
    )
    prefix_caching: bool = setting(
        True, "Keep the KV blocks of finished prompts for requests that begin alike."
    )
    prefix_sharing: str = setting(
        "tenant",
        "Who finds cached prefixes: tenant, the requests with the same API key; all, any request. "
        "Pinned prefixes are found by all.",
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
        "Steps for which later requests may start before one of many choices or beams that waits "
        "for as many free sequences at once; from then on they are kept for it. 0: none.",
        minimum=0,
    )
    preemption: str = setting(
        "auto",
        "How requests give up their blocks; auto takes what is cheaper, as measured at start.",
        choices=("recompute", "swap", "auto"),
    )
    outputs_retention: int = setting(
        10_000, "Entries of the outputs log kept for slow readers.", minimum=100
    )
    outputs_retention_bytes: int = setting(
        64 << 20,
        "Bytes that these entries have at most; log-probabilities and scores of prompts make "
        "entries large. What unfinished requests need comes on top.",
        minimum=1 << 20,
    )
    max_waiting_requests: int = setting(
        10_000, "Requests that may wait for their turn; more are refused (429). 0: any.", minimum=0
    )
    max_waiting_tokens: int = setting(
        20_000_000, "Prompt tokens that may wait for their turn. 0: any number.", minimum=0
    )
    max_tenant_requests: int = setting(
        0, "Requests of one API key that may wait for their turn. 0: any number.", minimum=0
    )
    max_tenant_tokens: int = setting(
        0, "Prompt tokens of one API key that may wait for their turn. 0: any number.", minimum=0
    )
    queue_ttl: float = setting(
        0.0,
        "Seconds that a request may wait for its turn before it is ended. 0: for ever.",
        minimum=0,
    )
    resume_window: float = setting(
        60.0, "Seconds for which a request that has ended can still be asked for.", minimum=0
    )
    gateway_grace: float = setting(
        60.0, "Seconds after which the requests of a gateway that has died are ended.", minimum=1
    )
    worker_patience: float = setting(
        120.0,
        "Seconds for which a worker that had served and cannot start any more (its model's folder "
        "is away) may try again; then the engine has failed, and open requests end with an error.",
        minimum=0,
    )
    drain_timeout: float = setting(
        30.0, "Seconds that running requests get to end when the scheduler is stopped.", minimum=0
    )
    record: str | None = setting(
        None, "File to append all that a replay of the scheduler needs; auto records nothing."
    )
    scheduler_metrics_host: str = setting("127.0.0.1", "Address of the scheduler's /metrics.")
    scheduler_metrics_port: int = setting(
        9101, "Port of the scheduler's /metrics; 0 for none.", minimum=0, maximum=65535
    )

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_sequences:
            raise SettingsError(
                "--max-num-batched-tokens",
                self.max_num_batched_tokens,
                f"must be at least --max-num-sequences, which is {self.max_num_sequences}: every "
                "running sequence needs a token in each step",
            )
