"""Every service is killed once under real clients: nothing is lost, repeated or changed.

``scripts/chaos`` does the same for longer, with pauses and under memory pressure.
"""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.settings import REPOSITORY
from tests.chaos.cluster import Cluster
from tests.chaos.disruptor import Disruptor
from tests.chaos.report import failures, row_of
from tests.chaos.scenario import Run, disturbed, run_clients
from tests.chaos.workload import make_asks
from tests.support.tool_template import with_tools

_TARGETS = ("scheduler", "redis", "gateway", "worker")
_CLIENTS, _REQUESTS = 2, 4
_SETTINGS = {"PAGESTREAM_NUM_BLOCKS": "128", "PAGESTREAM_NUM_HOST_BLOCKS": "0"}
_DEADLINE_S = 120.0


@pytest.mark.parametrize(
    ("targets", "settings"),
    [(_TARGETS, {}), (("worker",), {"PAGESTREAM_QUANTIZATION": "int4"})],
    ids=["each", "worker, int4"],
)
async def test_whichever_service_is_killed_no_token_is_lost_repeated_or_changed(
    targets: tuple[str, ...], settings: dict[str, str], tmp_path: Path
) -> None:
    asks = make_asks(
        seed=7, num_clients=_CLIENTS, num_requests=_REQUESTS, tokens=(64, 128), of_applications=True
    )
    model = with_tools(REPOSITORY / "models/demo", tmp_path / "model")
    calm, rough = Run(), Run()

    async with asyncio.timeout(2 * _DEADLINE_S):
        async with Cluster(tmp_path / "chaos", model, {**_SETTINGS, **settings}) as cluster:
            await run_clients(cluster, asks, "calm", False, _DEADLINE_S, _DEADLINE_S, calm)
            clients = run_clients(cluster, asks, "rough", False, _DEADLINE_S, _DEADLINE_S, rough)
            disruptor = Disruptor(cluster, targets, False, (0.0, 0.0), random.Random(7))
            await disturbed(cluster, clients, disruptor, rough, once=True)

    story = "\n".join(failures(rough, calm.outcomes, cluster.deaths))
    row = row_of("each killed once", rough, calm.outcomes)
    assert calm.num_complete == row.total == _CLIENTS * _REQUESTS, story
    assert len(rough.disruptions) == len(targets)
    assert row.is_good(exact=True), story


def test_a_run_without_requests_proves_nothing() -> None:
    assert not row_of("kill any", Run(), {}).was_asked


def test_a_scenario_that_there_is_not_is_named() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--scenarios", "worker", "wrker"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, "'wrker' is in the name of none" in done.stderr) == (2, True)
