"""Prompts beside the outputs log: where they are written, found again, and trimmed."""

from dataclasses import replace

from scheduler_svc.outputs.prompts_log import PromptsLog, read_prompts
from shared.bus.api import START, EntryId
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from shared.codec import decode
from shared.messages.outputs import RequestEnded, RequestState
from tests.support.requests import submit

KEYS = EngineKeys("engine-0")
EPOCH = 7
FENCE = EntryId(EPOCH + 1, 0)


def state(request_id: str, *prompt: int) -> RequestState:
    return RequestState(submit(request_id, list(prompt)), (), "1-0")


async def append(
    bus: MemoryBus, log: PromptsLog, *messages: RequestState | RequestEnded, below: int = 0
) -> EntryId:
    trim = EntryId(EPOCH, below) if below else None
    at = (await bus.append_all(log.split(messages, trim)))[-1]
    log.appended(at)
    return at


async def written(bus: MemoryBus, at: EntryId) -> list[RequestState]:
    """The states in an entry of outputs."""
    [entry] = (await bus.read({KEYS.outputs: EntryId(at.epoch, at.seq - 1)}, 0, 1))[KEYS.outputs]
    messages = [decode(data) for data in entry.messages]
    return [message for message in messages if isinstance(message, RequestState)]


async def test_an_entry_of_outputs_refers_to_the_prompts_of_its_states() -> None:
    bus, log = MemoryBus(lambda: 0), PromptsLog(KEYS, EPOCH)
    await append(bus, log, state("zero", 9))
    at = await append(bus, log, state("a", 1, 2, 3), RequestEnded("b", "stop", "", "1-0"))
    [found] = await written(bus, at)
    assert found.submit.lacks_prompt
    assert (found.prompt_at, found.submit.num_prompt_tokens) == (f"{EPOCH}-2", 3)
    stored = await read_prompts(bus, KEYS.prompts, FENCE)
    assert stored.restore(found).submit.prompt.tolist() == [1, 2, 3]


def test_what_every_gateway_reads_of_a_request_does_not_grow_with_its_prompt() -> None:
    sizes = []
    for num_tokens in (1_000, 100_000):
        prompts, outputs = PromptsLog(KEYS, EPOCH).split([state("a", *range(num_tokens))])
        assert sum(map(len, prompts.messages)) > 4 * num_tokens
        sizes.append(sum(map(len, outputs.messages)))
    assert max(sizes) < 1_000
    assert max(sizes) - min(sizes) <= 2, "the number of tokens"


async def test_another_prompt_than_that_of_the_state_is_not_taken() -> None:
    bus, log = MemoryBus(lambda: 0), PromptsLog(KEYS, EPOCH)
    at = await append(bus, log, state("a", 1, 2, 3), state("b", 4))
    [found, other] = await written(bus, at)
    stored = await read_prompts(bus, KEYS.prompts, FENCE)
    mixed = replace(found, submit=replace(found.submit, prompt_digest=other.submit.prompt_digest))
    assert stored.restore(mixed).submit.lacks_prompt
    assert stored.restore(replace(found, prompt_at=f"{EPOCH}-9")).submit.lacks_prompt


async def test_prompts_are_trimmed_with_the_entries_that_refer_to_them() -> None:
    bus, log = MemoryBus(lambda: 0), PromptsLog(KEYS, EPOCH)
    for number in range(6):
        await append(bus, log, state(f"r{number}", number))
        await append(bus, log, RequestEnded("other", "stop", "", "1-0"))
    assert await bus.length(KEYS.prompts) == 6
    await append(bus, log, state("late", 1), below=6)  # r3 is in entry 6
    kept = (await bus.read({KEYS.prompts: START}, 0, 10))[KEYS.prompts]
    assert [entry.id.seq for entry in kept] == [4, 5, 6, 7]


async def test_a_prompt_stays_in_the_next_state_where_a_gateway_reads_outputs_alone() -> None:
    bus, log = MemoryBus(lambda: 0), PromptsLog(KEYS, EPOCH)
    log.leave_in("old")
    at = await append(bus, log, state("old", 1, 2), state("new", 3))
    old, new = await written(bus, at)
    assert (old.submit.prompt.tolist(), old.prompt_at) == ([1, 2], "")
    assert new.submit.lacks_prompt
    [again] = await written(bus, await append(bus, log, state("old", 1, 2)))
    assert again.submit.lacks_prompt
