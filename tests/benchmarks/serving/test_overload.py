"""The figures of an overload, and the sampling of memory."""

import os

import redis

from benchmarks.serving.http_stream import RawAnswer
from benchmarks.serving.overload import Phase, faults, table
from benchmarks.serving.processes import held_by, kept_in_redis
from deploy.redis.server import Endpoint
from shared.bus.keys import EngineKeys

USAGE = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
EVENTS = [
    (1.5, b'{"choices": [{"text": "a"}]}'),
    (1.6, b'{"choices": [{"text": "b"}]}'),
    (1.6, USAGE),
    (1.6, b"[DONE]"),
]
SERVED = RawAnswer(1.0, 200, b"", EVENTS, 1.7)
REFUSED = RawAnswer(1.0, 429, b"{}", [], 1.01, retry_after_s=2)


def phase(name: str, *answers: RawAnswer) -> Phase:
    return Phase(name, 5.0, list(answers))


def found(*phases: Phase) -> dict:
    return {"phases": [some.figures() for some in phases], "memory": []}


def test_served_and_refused_answers_are_counted_apart() -> None:
    figures = phase("overload", SERVED, REFUSED, REFUSED).figures()
    assert figures["statuses"] == {200: 1, 429: 2}
    assert round(figures["ttft_ms_p50"]) == 500
    assert round(figures["itl_ms_p50"]) == 100
    assert round(figures["refused_ms_p99"]) == 10


def test_refusals_under_overload_alone_are_as_it_should_be() -> None:
    calm, over = phase("before", SERVED), phase("overload", SERVED, REFUSED)
    seen = found(calm, over, phase("after", SERVED))
    assert faults(seen) == []
    assert "| overload | 5.0 | 1 | 1 | 0 | 500 |" in table(seen)


def test_anything_else_is_a_fault() -> None:
    calm, over = phase("before", SERVED), phase("overload", SERVED, REFUSED)
    bug, bare = RawAnswer(1.0, 500, b"{}", [], 1.1), RawAnswer(1.0, 429, b"{}", [], 1.1)
    broken = phase("overload", SERVED, REFUSED)
    broken.broken["closed"] += 1
    assert faults(found(calm, phase("overload", REFUSED, bug), calm))
    assert faults(found(calm, phase("overload", SERVED, bare), calm))
    assert faults(found(calm, broken, calm))
    assert faults(found(calm, over, phase("after", SERVED, REFUSED)))
    assert faults(found(calm, phase("overload", SERVED), calm)) == ["overload: nothing was refused"]


def test_what_a_process_holds_is_seen() -> None:
    before = held_by(os.getpid())
    with open(os.devnull):
        after = held_by(os.getpid())
    assert after.num_fds == before.num_fds + 1
    assert after.rss_bytes > 2**20


def test_what_redis_keeps_is_seen(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    keys = EngineKeys("engine-0")
    for _ in range(3):
        client.xadd(keys.outputs, {"0": b"x"})
    client.xadd(keys.plans, {"0": b"x"})
    kept = kept_in_redis(Endpoint(None, port), "engine-0")
    assert (kept.requests, kept.plans, kept.outputs, kept.num_keys) == (0, 1, 3, 2)
    assert kept.used_bytes > 100_000
    client.close()
