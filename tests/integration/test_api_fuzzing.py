"""Whatever is asked, the API answers as it describes itself: a short run, the same every time.

The long one, against services that run (see docs/OPERATIONS.md):
    scripts/serve &
    python -m tests.gateway.api_fuzzer http://127.0.0.1:8000 --max-time 600
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.settings import REPOSITORY
from gateway.http.server import Server
from gateway.models.model_files import ModelFiles
from gateway.settings import GatewaySettings
from gateway.text.tokenizer import Tokenizer
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.bus.memory import MemoryBus
from tests.gateway.api_fuzzer import MODEL, StreamIsBroken, read_events
from tests.support.engine import running_engine

_DEMO_MODEL = str(REPOSITORY / "models" / "demo")
_DEADLINE_S = 240.0


@asynccontextmanager
async def gateway_with_engine(model: Path) -> AsyncIterator[str]:
    """URL of a gateway whose engine has this tiny model and the demo model's tokenizer."""
    bus = MemoryBus(lambda: time.time_ns() // 1_000_000)
    worker = WorkerSettings(
        model=str(model), served_model_name=MODEL, device="cpu", num_threads=1, num_blocks=128
    )
    tokenizer = Tokenizer.load(_DEMO_MODEL, trust_remote_code=False)
    settings = GatewaySettings(model=_DEMO_MODEL, served_model_name=MODEL, port=0)
    async with running_engine(bus, worker, SchedulerSettings()):
        server = Server(settings, bus, ModelFiles.of(MODEL, _DEMO_MODEL, tokenizer, settings))
        running = asyncio.ensure_future(server.run())
        port = await server.listening()
        while server.service.why_not_ready() is not None:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
        assert server.service.models.num_open == 0, "every call has ended"
        server.stop()
        await running


async def test_the_api_answers_as_it_describes_itself(llama: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(_DEADLINE_S), gateway_with_engine(llama) as url:
        options = "--seed 1 --max-examples 12 --phases examples,coverage,fuzzing"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.gateway.api_fuzzer", url, *options.split()),
            cwd=tmp_path,  # where it keeps what it found
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


@pytest.mark.parametrize(
    "text",
    [
        'data: {"choices": []}\n\n',
        "data: [DONE]",
        "event: x\ndata: [DONE]\n\n",
        "",
    ],
)
def test_a_stream_without_an_end_is_detected(text: str) -> None:
    with pytest.raises(StreamIsBroken):
        list(read_events(text))
