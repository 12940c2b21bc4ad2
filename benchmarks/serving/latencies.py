"""Computes latencies from the arrival times of events."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.serving.http_stream import RawAnswer, StreamFailed

_PERCENTILES = (50, 90, 99)
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """The times of one answer, in seconds of one clock.

    Attributes:
        arrivals_s: when each piece of text arrived; a piece may hold several tokens.
    """

    sent_s: float
    arrivals_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time per token after the first; None if there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def latency_s(self) -> float:
        """Time to the last token."""
        return self.arrivals_s[-1] - self.sent_s


def read_answer(answer: RawAnswer) -> StreamTimes:
    """Parse an answer; tokens are counted by the server's own usage.

    Raises:
        StreamFailed: the answer is incomplete, has no text, or has no usage.
    """
    arrivals: list[float] = []
    usage: dict[str, Any] | None = None
    is_whole = False
    for moment, data in answer.events:
        if data == _DONE:
            is_whole = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            raise StreamFailed(f"an event is no JSON: {data[:200]!r}") from None
        if event.get("error"):
            raise StreamFailed(f"the stream ended with an error: {event['error']}")
        usage = event.get("usage") or usage
        choices = event.get("choices", ())
        if any(map(_shows_text, choices)):
            arrivals.append(moment)
        # Not every server sends [DONE].
        is_whole = is_whole or any(choice.get("finish_reason") for choice in choices)
    if not is_whole:
        raise StreamFailed("the stream ended without a reason and without [DONE]")
    if usage is None:
        raise StreamFailed("the stream has no usage")
    if not arrivals:
        raise StreamFailed("the stream has no text")
    prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
    return StreamTimes(answer.sent_s, tuple(arrivals), prompt, output)


def _shows_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def summarize(streams: Sequence[StreamTimes], cpu_s: float) -> dict[str, float]:
    """The figures of one run.

    Args:
        streams: all answers of the run, at least one.
        cpu_s: CPU time of this process during the run.
    """
    began = min(stream.sent_s for stream in streams)
    ended = max(stream.arrivals_s[-1] for stream in streams)
    output = sum(stream.output_tokens for stream in streams)
    prompt = sum(stream.prompt_tokens for stream in streams)
    wall_s = ended - began
    gaps = np.concatenate([np.diff(stream.arrivals_s) for stream in streams])
    return {
        "requests": float(len(streams)),
        "prompt_tokens": float(prompt),
        "output_tokens": float(output),
        "duration_s": wall_s,
        "output_tokens_per_s": output / wall_s,
        "total_tokens_per_s": (prompt + output) / wall_s,
        "requests_per_s": len(streams) / wall_s,
        **_spread("ttft_ms", [stream.first_token_s for stream in streams]),
        **_spread("tpot_ms", _known(stream.per_token_s for stream in streams)),
        **_spread("itl_ms", gaps),
        **_spread("latency_ms", [stream.latency_s for stream in streams]),
        "client_cpu_share": cpu_s / wall_s,
        "client_us_per_token": 1e6 * cpu_s / output,
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure, over runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(name: str, values_s: Sequence[float] | np.ndarray) -> dict[str, float]:
    if not len(values_s):
        return {}
    values = 1_000 * np.asarray(values_s)
    found = {f"{name}_mean": float(values.mean())}
    for share in _PERCENTILES:
        found[f"{name}_p{share}"] = float(np.percentile(values, share))
    return found
