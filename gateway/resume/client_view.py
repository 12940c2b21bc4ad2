"""What a client that comes back has, as the engine is told of it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gateway.engine.events import Attached
from gateway.engine.outputs_reader import GOOD_ENDS
from shared.messages.endings import FinishReason
from shared.messages.requests import ChoiceView


def client_views(known: Attached, has: Sequence[tuple[int, bool]]) -> list[ChoiceView]:
    """What the client has of each choice, as far as the engine knows it.

    Of a beam search nothing is delivered before its end, so nothing is viewed.

    Args:
        known: what the engine has answered when it was asked for the request.
        has: tokens of each choice that the client has, and whether it has seen the choice's end.
    """
    if known.submit.sampling.beams is not None:
        return [ChoiceView(np.empty(0, np.int32), "")] * len(has)
    views = [
        _view(output, reason, num_tokens, has_end)
        for output, reason, (num_tokens, has_end) in zip(
            known.outputs, known.finish_reasons, has, strict=True
        )
    ]
    going_on = [len(view.tokens) for view in views if not view.finish_reason]
    if known.submit.sampling.num_logprobs is None or not going_on:
        return views
    # The log keeps no log-probabilities, so what is new must be drawn again, and choices are drawn
    # side by side: what the client has of the longer ones comes again, too, and is compared.
    shortest = min(going_on)
    return [
        view if view.finish_reason else replace(view, tokens=view.tokens[:shortest])
        for view in views
    ]


def _view(output: Sequence[int], reason: str, num_tokens: int, has_end: bool) -> ChoiceView:
    seen = np.array(output[:num_tokens], np.int32)
    if reason in GOOD_ENDS and len(seen) == len(output) == num_tokens:
        return ChoiceView(seen, reason)  # there is nothing left that could be generated
    # A stop string may have ended it, of which the engine need not know.
    return ChoiceView(seen, FinishReason.STOP.value if has_end else "")
