"""Compares what clients have of a request with what the log has, and changes its delivery."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from scheduler_svc.core.requests.ended_requests import EndedChoice, EndedRequest
from shared.codec import IntArray
from shared.messages.requests import Attach, ChoiceView, Submit, delivery_of

# Deliveries of one request that are remembered; earlier ones have ended by then.
_MOST_OVERTAKEN = 32


def delivered_by(attach: Attach, submit: Submit, ended: EndedRequest | None = None) -> Submit:
    """The request with the attaching gateway as its delivery.

    Args:
        submit: the request so far.
        ended: the same request, if it had ended.
    """
    known = None if ended is None else ended.submit
    overtaken: dict[str, None] = {}  # in their order
    for earlier in (submit, known, attach.submit):  # the log may have lost one
        if earlier is not None:
            overtaken |= dict.fromkeys((*earlier.overtaken, delivery_of(earlier.attachment)))
    overtaken.pop(delivery_of(attach.attachment), None)
    return replace(
        submit,
        gateway=attach.gateway,
        attachment=attach.attachment,
        overtaken=tuple(overtaken)[-_MOST_OVERTAKEN:],
    )


def complete_views(attach: Attach, submit: Submit) -> tuple[ChoiceView, ...]:
    """The client's views if there is one of each choice, else none."""
    return attach.views if len(attach.views) == submit.num_choices else ()


def may_follow(known: Mapping[int, EndedChoice], views: Sequence[ChoiceView]) -> bool:
    """Whether each choice equals the client's view, or begins with it.

    Args:
        known: choices by number; one that has not ended has no reason.
    """
    return all(_follows(known[choice], view) for choice, view in enumerate(views))


def continued(
    views: Sequence[ChoiceView], known: Mapping[int, EndedChoice] | None = None
) -> tuple[dict[int, IntArray], dict[int, EndedChoice]]:
    """Outputs of the choices that continue, and those that have ended, by the client's views.

    Args:
        known: choices whose end the client may not have seen yet.
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
