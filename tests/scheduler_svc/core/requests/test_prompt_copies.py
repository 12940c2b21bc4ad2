"""How often a long prompt stands in the logs, whatever happens to its request."""

import time

from gateway.engine.stored_prompts import read_prompt
from shared.bus.api import START, Append
from shared.bus.memory import MemoryBus
from shared.codec import Message, encode
from shared.messages.outputs import RequestState
from shared.messages.requests import Attach, Submit
from tests.scheduler_svc.service.peers import KEYS, Peer, Reader, ended, running, service, working
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit

_PROMPT = [position % 991 for position in range(25_000)]  # 100 kB
_MAX_TOKENS = 500


class QuickWorker(FakeWorker):
    """Does not check the contents of the pool."""

    def _check(self, *_: object) -> None:
        pass


async def copies(bus: MemoryBus, log: str, request: Submit) -> int:
    """How often the prompt of a request stands in a log."""
    found = await bus.read({log: START}, 0, 10_000)
    messages = [message for entry in found.get(log, ()) for message in entry.messages]
    return sum(message.count(request.prompt.tobytes()) for message in messages)


async def send(bus: MemoryBus, *messages: Message) -> None:
    await bus.append(Append(KEYS.requests, list(map(encode, messages))))


def attach(request: Submit, attachment: str) -> Attach:
    """As a gateway that has seen the request accepted attaches to it."""
    bare = request.without_prompt()
    return Attach(request.request_id, "gateway", attachment, bare, (), exact=False)


def holds_prompt(message: Message) -> bool:
    return isinstance(message, RequestState) and message.has_prompt


def is_stated(seen: list[Message], attachment: str) -> bool:
    last = next((found for found in reversed(seen) if isinstance(found, RequestState)), None)
    return last is not None and last.submit.attachment == attachment


async def test_a_prompt_is_written_again_only_where_its_entry_is_trimmed() -> None:
    bus, prompts = MemoryBus(lambda: time.time_ns() // 1_000_000), KEYS.prompts
    peer = Peer(bus, "w1", num_blocks=8_192, max_model_len=30_000, worker_type=QuickWorker)
    reader = Reader(bus)
    await peer.announce()
    request = submit("long", _PROMPT, max_tokens=_MAX_TOKENS)
    async with running(service(bus, outputs_retention=100)):
        await send(bus, request)
        await reader.until(lambda seen: is_stated(seen, request.attachment))
        assert await copies(bus, prompts, request) == 1
        for number in range(10):
            again = attach(request, f"delivery{number}")
            await send(bus, again)
            await reader.until(lambda seen: is_stated(seen, again.attachment))  # noqa: B023
        assert await copies(bus, prompts, request) == 1
        assert await copies(bus, KEYS.requests, request) == 1
        assert await copies(bus, KEYS.outputs, request) == 0, "every gateway reads it"
        async with working(peer):
            for num_tokens in range(50, 301, 50):  # as many steps as the log keeps, several times
                await reader.until(ended("long", num_tokens, reader))
                assert await copies(bus, prompts, request) <= 3, (
                    "each takes the place of the one before the last"
                )
        num_written = sum(map(holds_prompt, reader.seen))
        assert num_written > 2, "the first was trimmed"
    async with running(service(bus, outputs_retention=100)), working(peer):
        await reader.until(ended("long", 301, reader))
        assert await copies(bus, prompts, request) <= 4, "an epoch begins with one of its own"
        await reader.until(ended("long", 450, reader))
        assert await copies(bus, prompts, request) <= 3
        await reader.until(ended("long", _MAX_TOKENS, reader))
        look_up = Attach("long", "other", "late", None, (), exact=False)
        await send(bus, attach(request, "resumed"), look_up)
        await reader.until(lambda seen: is_stated(seen, "late"))
        reading = Attach("long", "other", "later", None, (), exact=False, reads_prompts=True)
        await send(bus, reading)
        await reader.until(lambda seen: is_stated(seen, "later"))
    states = [found for found in reader.seen if isinstance(found, RequestState)]
    bare, whole, referring = states[-3:]
    assert (len(bare.submit.prompt), whole.submit.prompt.tolist()) == (0, _PROMPT)
    assert referring.submit.lacks_prompt, "this gateway reads the prompts log"
    found = await read_prompt(bus, prompts, referring)
    assert found is not None
    assert found.submit.prompt.tolist() == _PROMPT
    expected = [(3 * position + 1) % 997 for position in range(25_000, 25_000 + _MAX_TOKENS)]
    for state in (bare, whole, found):
        assert state.choices[0].output.tolist() == expected
