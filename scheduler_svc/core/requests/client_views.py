"""Who delivers a request, and what its clients have of it, against what the log has."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from scheduler_svc.core.requests.ended_requests import EndedChoice, EndedRequest
from shared.codec import IntArray
from shared.messages.requests import Attach, ChoiceView, Submit, delivery_of

# Deliveries of one request that are remembered: who has been overtaken so often will have noticed.
_MOST_OVERTAKEN = 32


def delivered_by(attach: Attach, submit: Submit, ended: EndedRequest | None = None) -> Submit:
    """The request as the gateway that attaches delivers it.

    Args:
        ended: what it goes on from, if it had ended.
    """
    known = None if ended is None else ended.submit
    overtaken: dict[str, None] = {}  # in their order
    for earlier in (submit, known, attach.submit):  # the log may have lost some
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
    """What clients have, if that can be: a view of each choice."""
    return attach.views if len(attach.views) == submit.num_choices else ()


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
