"""What clients have of a request, against what the log has."""

from collections.abc import Mapping, Sequence

import numpy as np

from scheduler_svc.core.remembered import EndedChoice
from shared.codec import IntArray
from shared.messages import ChoiceView


def may_follow(known: Mapping[int, EndedChoice], views: Sequence[ChoiceView]) -> bool:
    """Whether what is known is what clients have, or begins with it.

    Args:
        known: by choice; one that has not ended has no reason.
    """
    return all(_follows(known[choice], view) for choice, view in enumerate(views))


def continued(
    views: Sequence[ChoiceView], known: Mapping[int, EndedChoice] | None = None
) -> tuple[dict[int, IntArray], dict[int, EndedChoice]]:
    """Outputs of the choices that go on, and those that have ended, if the clients are right.

    Args:
        known: choices whose end the clients may not have seen yet.
    """
    outputs: dict[int, IntArray] = {}
    ended: dict[int, EndedChoice] = {}
    for choice, view in enumerate(views):
        found = None if known is None else known[choice]
        if view.finish_reason:
            ended[choice] = EndedChoice(view.tokens, view.finish_reason)
        elif found is not None and found.reason and _follows(found, view):
            ended[choice] = found
        else:
            outputs[choice] = view.tokens
    return outputs, ended


def _follows(known: EndedChoice, view: ChoiceView) -> bool:
    num_seen = len(view.tokens)
    if view.finish_reason:
        return bool(known.reason) and np.array_equal(known.output, view.tokens)
    return np.array_equal(known.output[:num_seen], view.tokens)
