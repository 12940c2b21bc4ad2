"""Letters wait in their order, and tokens take little room."""

from gateway.engine.event_queue import ClientDisconnected, EventQueue
from gateway.engine.events import ChoiceFinished, TokensArrived
from shared.messages.endings import FinishReason
from tests.gateway.fake_engine import scores


async def test_tokens_that_wait_are_joined_by_choice_and_the_order_is_kept() -> None:
    queue = EventQueue()
    end = ChoiceFinished("a", 0, FinishReason.STOP)
    for token in range(3):
        queue.put(TokensArrived("a", 0, [token], ()))
    queue.put(TokensArrived("b", 0, [7], ()))
    queue.put(TokensArrived("a", 1, [8], ()))
    queue.put(TokensArrived("a", 0, [3], ()))
    queue.put(end)
    queue.put(ClientDisconnected())
    assert await queue.take() == [
        TokensArrived("a", 0, [0, 1, 2, 3], ()),
        TokensArrived("b", 0, [7], ()),
        TokensArrived("a", 1, [8], ()),
        end,
        ClientDisconnected(),
    ]


async def test_what_was_taken_is_not_added_to() -> None:
    queue = EventQueue()
    for token in range(2):
        queue.put(TokensArrived("a", 0, [token], ()))
        assert await queue.take() == [TokensArrived("a", 0, [token], ())]


async def test_tokens_with_log_probabilities_stay_apart() -> None:
    queue = EventQueue()
    events = [TokensArrived("a", 0, [n], (scores(n, -1.0, {n: -1.0}),)) for n in range(2)]
    for event in events:
        queue.put(event)
    taken = await queue.take()
    assert taken[0] is events[0]
    assert taken[1] is events[1]
