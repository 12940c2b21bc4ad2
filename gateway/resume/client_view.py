"""Views of what a returning client has, as the scheduler gets them in an Attach."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gateway.engine.events import Attached
from gateway.engine.outputs_follower import GOOD_ENDS
from shared.messages.endings import FinishReason
from shared.messages.requests import ChoiceView


def client_views(state: Attached, has: Sequence[tuple[int, bool]]) -> list[ChoiceView]:
    """What the client has of each choice, as far as the engine has it, too.

    A beam search delivers nothing before its end, so its views are empty.

    Args:
        state: the engine's answer to the look-up of the request.
        has: of each choice, the number of tokens that the client has, and whether it has the end.
    """
    if state.submit.sampling.beams is not None:
        return [ChoiceView(np.empty(0, np.int32), "")] * len(has)
    views = [
        _view(output, reason, num_tokens, has_end)
        for output, reason, (num_tokens, has_end) in zip(
            state.outputs, state.finish_reasons, has, strict=True
        )
    ]
    going_on = [len(view.tokens) for view in views if not view.finish_reason]
    if state.submit.sampling.num_logprobs is None or not going_on:
        return views
    # The log keeps no log-probabilities, so new tokens must be sampled again, and all choices are
    # sampled in the same steps. So tokens of longer choices come again, too, and are compared.
    shortest = min(going_on)
    return [
        view if view.finish_reason else replace(view, tokens=view.tokens[:shortest])
        for view in views
    ]


def _view(output: Sequence[int], reason: str, num_tokens: int, has_end: bool) -> ChoiceView:
    seen = np.array(output[:num_tokens], np.int32)
    if reason in GOOD_ENDS and len(seen) == len(output) == num_tokens:
        return ChoiceView(seen, reason)  # nothing is left to generate
    # A stop string may have ended it, which the engine does not see.
    return ChoiceView(seen, FinishReason.STOP.value if has_end else "")
