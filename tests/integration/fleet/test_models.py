"""Two models with different tokenizers, an engine each, behind gateways of one directory.

Redis, schedulers, workers and gateways are real; each engine has a database of its own.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gateway.http.server import Server
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.bus.keys import engine_lease
from shared.bus.redis_bus import RedisBus
from tests.gateway.tokenizers_for_tests import byte_level
from tests.support.engine import running_scheduler, running_worker
from tests.support.models import tiny_model

DEMO = Path(__file__).parents[3] / "models" / "demo"
DEADLINE_S = 60
FEW, MANY = 12, 300  # generated tokens
WORDS, BYTES = "words", "bytes"  # the models
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two models by their names: one has the demo model's tokenizer, one bytes."""
    folder = tmp_path_factory.mktemp("models")
    words = tiny_model("llama", folder).rename(folder / WORDS)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, words)
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    text = tiny_model("qwen3", folder, vocab_size=len(tokenizer)).rename(folder / BYTES)
    tokenizer.save_pretrained(text)
    return {WORDS: words, BYTES: text}


class Alone:
    """A model in transformers."""

    def __init__(self, root: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(root)
        self._model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32)

    def continued(self, prompt: str, num_tokens: int) -> str:
        """The text behind a prompt."""
        return self._behind(self.tokenizer.encode(prompt), num_tokens)

    def answered(self, question: str, num_tokens: int) -> str:
        """The next message behind one of the user."""
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self._behind(self.tokenizer.encode(text, add_special_tokens=False), num_tokens)

    def _behind(self, tokens: list[int], num_tokens: int) -> str:
        with torch.inference_mode():
            found = self._model.generate(
                input_ids=torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
                max_new_tokens=num_tokens,
                eos_token_id=None,
                do_sample=False,
            )
        text: str = self.tokenizer.decode(found[0, len(tokens) :], skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def alone(roots: dict[str, Path]) -> dict[str, Alone]:
    return {name: Alone(root) for name, root in roots.items()}


@dataclass
class Fleet:
    """A directory, engines that come and go, and gateways."""

    redis_url: str
    roots: dict[str, Path]
    gateways: list[httpx.AsyncClient] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    num_engines: int = 0

    @asynccontextmanager
    async def engine(self, model: str) -> AsyncIterator[str]:
        """An engine inside the block; its id."""
        self.num_engines += 1
        engine_id = f"engine-{self.num_engines}"
        url = f"{self.redis_url.removesuffix('/0')}/{self.num_engines}"
        scheduler = SchedulerSettings(
            engine_id=engine_id, redis_url=url, directory_url=self.redis_url
        )
        root = str(self.roots[model])
        worker = WorkerSettings(
            model=root, device="cpu", dtype="float32", num_threads=1, num_blocks=64
        )
        bus, directory = RedisBus(url), RedisBus(self.redis_url)
        try:
            async with (
                running_worker(bus, worker, engine_id),
                running_scheduler(bus, scheduler, directory=directory),
            ):
                yield engine_id
        finally:
            await bus.close()
            await directory.close()

    async def until_ready(self, *models: str) -> None:
        """Wait until all gateways serve these models."""
        for gateway in self.gateways:
            await until(lambda gateway=gateway: ready_at(gateway), set(models))


async def ready_at(gateway: httpx.AsyncClient) -> set[str]:
    cards = (await gateway.get("/v1/models")).json()["data"]
    return {card["id"] for card in cards if card["ready"]}


async def until(found: Callable[[], Any], expected: object) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await found() != expected:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet_of(
    redis_url: str, roots: dict[str, Path], num_gateways: int, **changes: Any
) -> AsyncIterator[Fleet]:
    fleet = Fleet(redis_url, roots)
    async with AsyncExitStack() as stack:
        for _ in range(num_gateways):
            given = {"model_retention": 1.0, "engine_patience": 1.0} | changes
            settings = GatewaySettings(port=0, directory_url=redis_url, **given)
            bus = RedisBus(redis_url)
            server = Server(settings, bus, None, bus)
            running = asyncio.ensure_future(server.run())
            url = f"http://127.0.0.1:{await server.listening()}"
            fleet.servers.append(server)
            fleet.gateways.append(
                await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S))
            )
            stack.push_async_callback(bus.close)
            stack.push_async_callback(lambda running=running: running)
            stack.callback(server.stop)
        yield fleet


def asked(model: str, text: str, num_tokens: int = FEW, **more: Any) -> dict[str, Any]:
    """A greedy completion."""
    body = {"model": model, "prompt": text, "max_tokens": num_tokens, "temperature": 0}
    return body | {"ignore_eos": True} | more


def text_in(stream: str) -> str:
    datas = [block.partition("data: ")[2] for block in stream.split("\n\n") if block]
    assert datas[-1] == "[DONE]"
    chunks = [json.loads(data) for data in datas[:-1]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def test_each_model_is_answered_at_every_gateway_as_transformers_answers(
    redis_url: str, roots: dict[str, Path], alone: dict[str, Alone]
) -> None:
    async with (
        fleet_of(redis_url, roots, 2) as fleet,
        fleet.engine(WORDS),
        fleet.engine(BYTES),
    ):
        await fleet.until_ready(WORDS, BYTES)
        for gateway in fleet.gateways:
            cards = {card["id"]: card for card in (await gateway.get("/v1/models")).json()["data"]}
            for model in (WORDS, BYTES):
                assert cards[model]["root"] == str(roots[model])
                assert cards[model]["num_engines"] == 1
                assert cards[model]["max_model_len"] > FEW
                done = await gateway.post("/v1/completions", json=asked(model, "Once upon"))
                text = done.json()["choices"][0]["text"]
                assert text == alone[model].continued("Once upon", FEW)
                messages = [{"role": "user", "content": "Who is there?"}]
                body = {"messages": messages, "model": model, "max_tokens": FEW}
                body |= {"temperature": 0, "ignore_eos": True}
                chat = await gateway.post("/v1/chat/completions", json=body)
                message = chat.json()["choices"][0]["message"]["content"]
                assert message == alone[model].answered("Who is there?", FEW)
                tokens = await gateway.post("/tokenize", json={"model": model, "prompt": "Once"})
                assert tokens.json()["tokens"] == alone[model].tokenizer.encode("Once")
        [gateway, _] = fleet.gateways
        unknown = await gateway.post("/v1/completions", json=asked("none", "Once"))
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert "'none'" in unknown.json()["error"]["message"]
        assert "'bytes' and 'words'" in unknown.json()["error"]["message"]
        unnamed = await gateway.post("/tokenize", json={"prompt": "Once"})
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        metrics = (await gateway.get("/metrics")).text
        for model in (WORDS, BYTES):
            counted = 'pagestream:time_to_first_token_seconds_count{engine="engine-0",model_name='
            assert f'{counted}"{model}"}} 2.0' in metrics


async def test_streams_and_keys_work_for_each_model_from_any_gateway(
    redis_url: str, roots: dict[str, Path], alone: dict[str, Alone]
) -> None:
    async with (
        fleet_of(redis_url, roots, 2) as fleet,
        fleet.engine(WORDS),
        fleet.engine(BYTES),
    ):
        await fleet.until_ready(WORDS, BYTES)
        first, second = fleet.gateways
        for model in (WORDS, BYTES):
            body = asked(model, "Once", MANY, stream=True, stream_resume=True)
            async with first.stream("POST", "/v1/completions", json=body) as response:
                url = response.headers["x-stream-url"]
                await anext(response.aiter_lines())
            assert text_in((await second.get(url)).text) == alone[model].continued("Once", MANY)

        key = {"Idempotency-Key": "one"}
        body = asked(WORDS, "Once")
        once = await first.post("/v1/completions", json=body, headers=key)
        again = await second.post("/v1/completions", json=body, headers=key)
        assert once.json()["id"] == again.json()["id"]
        other = await second.post("/v1/completions", json=asked(BYTES, "Once"), headers=key)
        assert other.status_code == 422
        assert (
            once.json()["choices"]
            == (await second.post("/v1/completions", json=body, headers=key)).json()["choices"]
        ), "the refused call took nothing away"


async def test_kept_responses_and_batches_work_for_each_model_from_any_gateway(
    redis_url: str, roots: dict[str, Path], alone: dict[str, Alone]
) -> None:
    async with (
        fleet_of(redis_url, roots, 2) as fleet,
        fleet.engine(WORDS),
        fleet.engine(BYTES),
    ):
        await fleet.until_ready(WORDS, BYTES)
        first, second = fleet.gateways
        body = {"model": BYTES, "input": "Hello", "max_output_tokens": FEW, "temperature": 0}
        kept = (await first.post("/v1/responses", json=body | {"background": True})).json()
        path = f"/v1/responses/{kept['id']}"

        async def status() -> str:
            found: str = (await second.get(path)).json()["status"]
            return found

        await until(lambda: ended(status), True)
        answer = (await second.get(path)).json()["output"][0]["content"][0]["text"]
        assert answer
        assert alone[BYTES].answered("Hello", FEW).startswith(answer), "it may have ended"
        body |= {"model": WORDS, "previous_response_id": kept["id"]}
        assert (await second.post("/v1/responses", json=body)).status_code == 200

        path = await begin_batch(first, WORDS, BYTES, "none")
        await until(lambda: ended(status), True)
        found = (await second.get(path)).json()
        texts = await texts_of(second, found)
        assert texts == {model: alone[model].continued("Once", FEW) for model in (WORDS, BYTES)}
        errors = (await second.get(f"/v1/files/{found['error_file_id']}/content")).text
        assert "model_not_found" in errors


async def begin_batch(gateway: httpx.AsyncClient, *models: str) -> str:
    """Begin a batch with a line for each model; its path."""
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions"}
        | {"body": asked(model, "Once")}
        for model in models
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = await gateway.post(
        "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}
    )
    batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions"}
    made = await gateway.post("/v1/batches", json=batch | {"completion_window": "24h"})
    return f"/v1/batches/{made.json()['id']}"


async def texts_of(gateway: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, str]:
    """The answers of a batch, by the ids of its lines."""
    output = (await gateway.get(f"/v1/files/{batch['output_file_id']}/content")).text
    rows = [json.loads(row) for row in output.splitlines()]
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}


async def ended(status: Callable[[], Any]) -> bool:
    return await status() not in ("queued", "in_progress", "validating", "finalizing")


async def test_a_model_comes_and_goes_while_streams_of_another_go_on(
    redis_url: str, roots: dict[str, Path], alone: dict[str, Alone]
) -> None:
    async with fleet_of(redis_url, roots, 1) as fleet, fleet.engine(WORDS):
        [gateway] = fleet.gateways
        await fleet.until_ready(WORDS)
        body = asked(WORDS, "Once", MANY, stream=True)
        bytes_asked = asked(BYTES, "Once")
        assert (await gateway.post("/v1/completions", json=bytes_asked)).status_code == 404
        stream = asyncio.ensure_future(gateway.post("/v1/completions", json=body))
        async with fleet.engine(BYTES) as engine_id:
            await fleet.until_ready(WORDS, BYTES)
            done = await gateway.post("/v1/completions", json=bytes_asked)
            assert done.json()["choices"][0]["text"] == alone[BYTES].continued("Once", FEW)
        away = await gateway.post("/v1/completions", json=bytes_asked)
        assert away.status_code == 503
        assert int(away.headers["retry-after"]) > 0
        [card] = [c for c in (await gateway.get("/v1/models")).json()["data"] if c["id"] == BYTES]
        assert (card["ready"], card["num_engines"], card["max_model_len"]) == (False, 0, None)
        assert (await gateway.get("/health/ready")).status_code == 200
        assert text_in((await stream).text) == alone[WORDS].continued("Once", MANY)

        directory = RedisBus(redis_url)
        await directory.delete(engine_lease(engine_id))  # as if its time were over

        async def status() -> int:
            return (await gateway.post("/v1/completions", json=bytes_asked)).status_code

        await until(status, 404)
        assert {card["id"] for card in (await gateway.get("/v1/models")).json()["data"]} == {WORDS}
        again = await gateway.post("/v1/completions", json=asked(WORDS, "Once"))
        assert again.json()["choices"][0]["text"] == alone[WORDS].continued("Once", FEW)
        await directory.close()


async def test_a_batch_waits_for_a_model_that_is_away_and_other_lines_do_not(
    redis_url: str, roots: dict[str, Path], alone: dict[str, Alone]
) -> None:
    async with (
        fleet_of(redis_url, roots, 1, model_retention=60, batch_concurrency=1) as fleet,
        fleet.engine(WORDS),
    ):
        [gateway] = fleet.gateways
        async with fleet.engine(BYTES):
            await fleet.until_ready(WORDS, BYTES)
        await fleet.until_ready(WORDS)
        waiting = await begin_batch(gateway, BYTES)
        path = await begin_batch(gateway, WORDS)

        async def status() -> str:
            found: str = (await gateway.get(path)).json()["status"]
            return found

        await until(status, "completed")
        path = waiting
        assert await status() == "in_progress"
        async with fleet.engine(BYTES):
            await until(status, "completed")
            texts = await texts_of(gateway, (await gateway.get(path)).json())
            assert texts == {BYTES: alone[BYTES].continued("Once", FEW)}
