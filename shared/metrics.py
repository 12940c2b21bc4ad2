"""The metrics of all services. The only module that imports prometheus_client.

Names are those of vLLM with another prefix, so that dashboards and autoscalers need little change.
Each service has one of the classes below; the launcher and Docker scrape each of them.
"""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

PREFIX = "pagestream:"
CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000, 100_000)
_LABELS = ("model_name", "engine")

_M = TypeVar("_M", Counter, Gauge, Histogram)


class _Metrics:
    """A registry, and the label values of metrics in it.

    Args:
        beside: metrics with other values of these labels, of the same process.
    """

    def __init__(self, model_name: str, engine: str, beside: "_Metrics | None" = None) -> None:
        self._values = (model_name, engine)
        self.registry: CollectorRegistry = beside.registry if beside else CollectorRegistry()
        self._families: dict[str, Any] = beside._families if beside else {}
        if beside is None:
            ProcessCollector(registry=self.registry)

    def _family(self, kind: type[_M], name: str, text: str, *labels: str, **options: Any) -> _M:
        """The metric of a name, whatever the values of its labels."""
        if name not in self._families:
            made = kind(PREFIX + name, text, (*_LABELS, *labels), registry=self.registry, **options)
            self._families[name] = made
        found: _M = self._families[name]
        return found

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text).labels(*self._values)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._family(Gauge, name, text).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._family(Histogram, name, text, buckets=buckets).labels(*self._values)

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> "CounterFamily":
        metric = self._family(Counter, name, text, label)
        return {value: metric.labels(*self._values, value) for value in values}

    def _gauges(self, name: str, text: str, label: str, values: Sequence[str]) -> "GaugeFamily":
        metric = self._family(Gauge, name, text, label)
        return {value: metric.labels(*self._values, value) for value in values}

    def _info(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        """A gauge that is 1, whose labels are what it is about."""
        self._family(Gauge, name, text, *labels).labels(*self._values, *labels.values()).set(1)

    def _counter_by(self, name: str, text: str, *labels: str) -> "LabelledCounter":
        """A counter whose further labels have values that are not known at the start."""
        return LabelledCounter(self._family(Counter, name, text, *labels), self._values)

    def forget(self) -> None:
        """Render the metrics with these values of labels no more."""
        for family in self._families.values():
            family.remove_by_labels(dict(zip(_LABELS, self._values, strict=True)))

    def render(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def serve(self, host: str, port: int) -> None:
        """Answer scrapes on a thread; port 0: do nothing."""
        if port:
            server = _Server((host, port), _handler(self.render))
            threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class LabelledCounter:
    """Counters of one name, by the values of their labels."""

    def __init__(self, metric: Counter, values: tuple[str, ...]) -> None:
        self._metric = metric
        self._values = values

    def inc(self, amount: float, *labels: str) -> None:
        """Add to the counter with these labels; nothing is made for an amount of 0."""
        if amount:
            self._metric.labels(*self._values, *labels).inc(amount)


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


def _handler(render: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    # prometheus_client's own server answers Prometheus in a format that replaces colons in names by
    # underscores. The names would differ from those of the gateway, which does not use that server.
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds of silence; each connection has a thread

        def do_GET(self) -> None:
            body = render()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Do not log scrapes."""

    return Handler


CounterFamily = dict[str, Counter]
GaugeFamily = dict[str, Gauge]


class GatewayMetrics(_Metrics):
    """Refusals and batches of one gateway.

    Args:
        model_name: that it serves; "": all those of a fleet.
    """

    def __init__(self, model_name: str, engine: str) -> None:
        super().__init__(model_name, engine)
        self._engine = engine
        self.admission_rejections = self._counters(
            "admission_rejections",
            "Requests refused before they were accepted.",
            "reason",
            (
                *("invalid", "too_long", "too_large", "unknown_model", "no_engine", "draining"),
                *("unauthorized", "overloaded"),
            ),
        )
        self._add_batches()

    def of_model(self, name: str) -> "ModelMetrics":
        """What is measured of the calls of one model."""
        return ModelMetrics(name, self._engine, self)

    def _add_batches(self) -> None:
        going = ("validating", "in_progress", "finalizing", "cancelling")
        about = "Batches that this gateway works on, by status."
        self.batches = self._gauges("batches", about, "status", going)
        ended = ("completed", "failed", "expired", "cancelled")
        about = "Batches that this gateway brought to their end, by status."
        self.batches_ended = self._counters("batches_ended", about, "status", ended)
        about = "Lines of batches that this gateway wrote an answer or an error for."
        self.batch_lines = self._counters("batch_lines", about, "result", ("completed", "failed"))


class ModelMetrics(_Metrics):
    """Latencies and tokens of one model, as clients see them."""

    def __init__(self, model_name: str, engine: str, beside: _Metrics | None = None) -> None:
        super().__init__(model_name, engine, beside)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the POST to the first token.", _LATENCY_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one choice.", _LATENCY_S
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the POST to the last byte.", _LATENCY_S
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS
        )
        about = "Prompt tokens of finished requests that lay in the prefix cache."
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", about)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a finished request.", _TOKENS
        )
        self.request_success = self._counters(
            "request_success",
            "Requests that ended, by reason.",
            "finished_reason",
            ("stop", "length", "abort", "error", "deadline", "overloaded"),
        )
        about = "Calls sent to each engine of a fleet, by the reason of the choice."
        self.routed_requests = self._counter_by("routed_requests", about, "to_engine", "reason")
        about = "Requests that went on in another engine, as theirs was lost or released them."
        self.moved_requests = self._counters("moved_requests", about, "why", ("lost", "released"))
        self.open_streams = self._gauge("open_streams", "Requests that clients wait for.")
        self.outputs_lag_entries = self._gauge(
            "gateway_outputs_read_entries", "Entries that the last read of outputs returned."
        )
        self.outputs_lag_seconds = self._gauge(
            "gateway_outputs_lag_seconds",
            "Since outputs was last read to its end, 0 while no client waits.",
        )


class SchedulerMetrics(_Metrics):
    """Queues, blocks and plans."""

    def __init__(self, model_name: str, engine: str) -> None:
        super().__init__(model_name, engine)
        self._add_queues()
        self._add_blocks()
        self._add_plans()

    def _add_queues(self) -> None:
        self.num_requests_running = self._gauge("num_requests_running", "Requests with blocks.")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests that wait.")
        self.num_waiting_tokens = self._gauge(
            "num_waiting_tokens", "Prompt tokens of accepted requests that are in no plan yet."
        )
        self.num_requests_swapped = self._gauge(
            "num_requests_swapped", "Waiting requests whose keys and values are in the host pool."
        )
        self.num_preemptions = self._counters(
            "num_preemptions", "Requests that lost their blocks.", "kind", ("recompute", "swap")
        )
        self.recomputed_tokens = self._counter(
            "recomputed_tokens", "Tokens computed again after preemption or recovery."
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.tenant_tokens = self._counter_by(
            "tenant_tokens",
            "Tokens of each API key: computed and cached prompt tokens at admission, tokens "
            "recomputed after preemption or recovery, tokens generated by requests that ended.",
            *("tenant", "kind"),
        )
        self.tenant_block_seconds = self._counter_by(
            "tenant_block_seconds",
            "KV blocks in the tables of each API key's sequences, summed over time.",
            "tenant",
        )
        self.request_queue_time = self._histogram(
            "request_queue_time_seconds", "From acceptance to the first plan.", _LATENCY_S
        )
        self.request_prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the first plan to the first token.", _LATENCY_S
        )
        self.request_decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY_S
        )

    def _add_blocks(self) -> None:
        self.kv_cache_usage_perc = self._gauge(
            "kv_cache_usage_perc", "Share of the blocks that requests use, 0 to 1."
        )
        self.kv_cache_token_usage_perc = self._gauge(
            "kv_cache_token_usage_perc", "Share of the token slots that hold a token, 0 to 1."
        )
        self.kv_cache_capacity_bytes = self._gauge(
            "kv_cache_capacity_bytes", "Size of the KV pool."
        )
        self.kv_cache_bytes = self._gauges(
            "kv_cache_bytes",
            "KV pool by state: token states, reserved slots, pinned prefixes that no request uses, "
            "cached prefixes, free blocks.",
            "state",
            ("tokens", "reserved", "pinned", "cached", "free"),
        )
        self.pinned_prefixes = self._gauge(
            "pinned_prefixes", "Prefixes that are pinned, or will be when they are computed."
        )
        self.pinned_blocks = self._gauge(
            "kv_pinned_blocks", "Blocks of pinned prefixes, also those that requests use now."
        )
        self.prefixes_given_up = self._counter(
            "pinned_prefixes_given_up",
            "Pinned prefixes that were dropped because a request could not run otherwise.",
        )
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Tokens found in the prefix cache."
        )
        self.shared_blocks = self._gauge(
            "kv_blocks_saved_by_sharing", "Blocks that would be needed in addition without sharing."
        )
        self.copied_blocks = self._counter("kv_copy_on_write_blocks", "Blocks copied on write.")
        self.swapped_blocks = self._counters(
            "kv_swapped_blocks",
            "Blocks moved to and from the host pool.",
            "direction",
            ("out", "in"),
        )

    def _add_plans(self) -> None:
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens in one step.", _TOKENS
        )
        self.schedule_seconds = self._histogram(
            "scheduler_step_seconds", "Time in schedule and apply, per read of the logs.", _STEP_S
        )
        self.round_trip_seconds = self._histogram(
            "plan_round_trip_seconds", "From appending a plan to reading its result.", _STEP_S
        )
        self.epoch = self._gauge("epoch", "Current epoch, milliseconds since 1970.")
        self.last_step_timestamp = self._gauge(
            "last_step_timestamp_seconds", "When the last result was applied."
        )
        self.log_entries = self._gauges(
            "log_entries",
            "Entries held in each log.",
            "log",
            ("requests", "plans", "outputs", "prompts"),
        )


class WorkerMetrics(_Metrics):
    """Times of steps, and memory."""

    def __init__(self, model_name: str, engine: str) -> None:
        super().__init__(model_name, engine)
        self.step_seconds = self._histogram(
            "worker_step_seconds", "From having a plan to having its result.", _LATENCY_S
        )
        self.model_seconds = self._histogram(
            "worker_model_seconds", "Forward pass of one step.", _LATENCY_S
        )
        self.sample_seconds = self._histogram(
            "worker_sample_seconds", "Sampling of one step.", _LATENCY_S
        )
        self.wait_seconds = self._histogram(
            "worker_wait_seconds", "From a result to the next plan.", _STEP_S
        )
        self.loop_overhead_seconds = self._histogram(
            "worker_loop_overhead_seconds",
            "From the end of a step to the beginning of the next, whose plan was there already.",
            _STEP_S,
        )
        self.steps = self._counter("worker_steps", "Plans executed.")
        self.resident_sequences = self._gauge(
            "worker_resident_sequences", "Sequences that are resident on the worker."
        )
        self.kv_map_seconds = self._histogram(
            "worker_kv_map_seconds",
            "Mapping and unmapping of blocks for one step, with virtual KV memory.",
            _STEP_S,
        )
        self.kv_map_wait_seconds = self._histogram(
            "worker_kv_map_wait_seconds",
            "Time that a step waited for its mappings; the rest was hidden behind the step before.",
            _STEP_S,
        )
        self.kv_mapped_bytes = self._gauge(
            "worker_kv_mapped_bytes",
            "Physical memory mapped into resident sequences, with virtual KV memory.",
        )
        self.kv_mappings = self._gauge(
            "worker_kv_mappings", "Memory areas that virtual KV memory takes, at most."
        )
        self.kv_pool_bytes = self._gauge("worker_kv_pool_bytes", "Memory of the KV pool.")
        self.sums_seconds = self._histogram(
            "worker_sums_seconds",
            "Time of a step in sums over the ranks of an engine, waiting for the slowest included.",
            _STEP_S,
        )
        self.weight_bytes = self._gauge("worker_weight_bytes", "Memory of the model's weights.")

    def describe_kv(self, dtype: str, num_bytes: int) -> None:
        """Set the KV pool's size, and the type of its keys and values as a label."""
        self.kv_pool_bytes.set(num_bytes)
        self._info("worker_kv_dtype", "Type of keys and values; 1.", {"dtype": dtype})

    def describe_weights(self, labels: Mapping[str, str], num_bytes: int) -> None:
        """Set the weights' size, and their format and the kernels that compute with them as labels.

        Args:
            labels: values by names.
            num_bytes: of all weights.
        """
        self.weight_bytes.set(num_bytes)
        text = "Type of the model, format of its weights, and the kernels of its layers; 1."
        self._info("worker_weights", text, labels)
