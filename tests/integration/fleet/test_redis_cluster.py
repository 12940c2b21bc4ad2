"""A fleet on a Redis Cluster: engines and directory are on its nodes, and their slots move."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from shared.bus.keys import ENGINES, EngineKeys
from tests.support.processes.fleet import DEADLINE_S, Processes, text_of, wait_for
from tests.support.processes.redis_cluster import RedisCluster

NAMES = ("engine-0", "engine-1")
BODY = {"model": "demo", "prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
NUM_SEEN = 20  # events before something happens


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(tmp_path, stack)


class Streamed:
    """A stream that is read in parts."""

    def __init__(self, answer: httpx.Response) -> None:
        self.engine = answer.headers["x-engine"].partition(";")[0]
        self.text = ""
        self.has_ended = False
        self._lines = answer.iter_lines()

    def read(self, num_events: int | None = None) -> None:
        """Read so many events; None: all that come."""
        for line in self._lines:
            self.text += text_of(line)
            self.has_ended |= line == "data: [DONE]"
            if num_events is not None:
                num_events -= line.startswith("data: {")
                if not num_events:
                    return


def test_a_stream_goes_on_while_its_engines_slot_moves_to_another_node(
    processes: Processes, redis_cluster: RedisCluster
) -> None:
    for name in NAMES:
        processes.start_engine(name, redis_cluster.url, redis_cluster.url)
    url = processes.start_gateway("gateway-0", redis_cluster.url)
    wait_for(url, processes)
    expected = httpx.post(f"{url}/v1/completions", json=BODY, timeout=DEADLINE_S)
    body = BODY | {"stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        stream = Streamed(answer)
        stream.read(NUM_SEEN)
        key = EngineKeys(stream.engine).outputs
        source = redis_cluster.owner(key)
        redis_cluster.move(ENGINES, redis_cluster.other_than(redis_cluster.owner(ENGINES)))
        with redis_cluster.moving(key, redis_cluster.other_than(source)) as migrate:
            migrate(key)  # neither node can execute the scheduler's transactions now
            assert not stream.has_ended
        stream.read()
    assert stream.has_ended, processes.logs()
    assert stream.text == expected.json()["choices"][0]["text"]
    assert redis_cluster.owner(key) is not source
    bodies = [BODY | {"max_tokens": 1, "prompt": f"{number} times"} for number in range(8)]
    answers = [httpx.post(f"{url}/v1/completions", json=one, timeout=DEADLINE_S) for one in bodies]
    used = {one.headers["x-engine"].partition(";")[0] for one in answers}
    assert used == {*NAMES}, processes.logs()
