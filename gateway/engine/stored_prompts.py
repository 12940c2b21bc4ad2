"""Reads prompts of requests that are taken over by their ids alone."""

from shared.bus.api import Bus, EntryId
from shared.messages.outputs import RequestState
from shared.messages.prompts import decode_prompts, with_prompt


async def read_prompt(bus: Bus, log: str, state: RequestState) -> RequestState | None:
    """A state with the prompt that it refers to; None if the log does not have it any more.

    Args:
        log: the engine's prompts.

    Raises:
        BusUnavailable: Redis does not answer.
    """
    at = EntryId.parse(state.prompt_at)
    before = EntryId(at.epoch, max(at.seq - 1, 0))
    for entry in (await bus.read({log: before}, 0, 1)).get(log, []):
        if entry.id == at:
            prompts = decode_prompts(entry.messages)
            return with_prompt(state, prompts.get(state.submit.request_id))
    return None
