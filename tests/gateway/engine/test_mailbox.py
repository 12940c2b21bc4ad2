"""Letters wait in their order, and tokens take little room."""

from gateway.engine.events import ChoiceFinished, TokensArrived
from gateway.engine.mailbox import ClientGone, Mailbox
from shared.messages.endings import FinishReason
from tests.gateway.fake_engine import scores


async def test_tokens_that_wait_are_joined_by_choice_and_the_order_is_kept() -> None:
    mailbox = Mailbox()
    end = ChoiceFinished("a", 0, FinishReason.STOP)
    for token in range(3):
        mailbox.put(TokensArrived("a", 0, [token], ()))
    mailbox.put(TokensArrived("b", 0, [7], ()))
    mailbox.put(TokensArrived("a", 1, [8], ()))
    mailbox.put(TokensArrived("a", 0, [3], ()))
    mailbox.put(end)
    mailbox.put(ClientGone())
    assert await mailbox.take() == [
        TokensArrived("a", 0, [0, 1, 2, 3], ()),
        TokensArrived("b", 0, [7], ()),
        TokensArrived("a", 1, [8], ()),
        end,
        ClientGone(),
    ]


async def test_what_was_taken_is_not_added_to() -> None:
    mailbox = Mailbox()
    for token in range(2):
        mailbox.put(TokensArrived("a", 0, [token], ()))
        assert await mailbox.take() == [TokensArrived("a", 0, [token], ())]


async def test_tokens_with_log_probabilities_stay_apart() -> None:
    mailbox = Mailbox()
    letters = [TokensArrived("a", 0, [n], (scores(n, -1.0, {n: -1.0}),)) for n in range(2)]
    for letter in letters:
        mailbox.put(letter)
    taken = await mailbox.take()
    assert taken[0] is letters[0]
    assert taken[1] is letters[1]
