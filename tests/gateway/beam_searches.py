"""Beam searches of a gateway, with made-up hypotheses."""

from typing import Any

from shared.messages.requests import Submit
from tests.gateway.conftest import Stage
from tests.gateway.event_streams import tokens_of
from tests.gateway.fake_engine import hypothesis


async def answer_search(stage: Stage, *texts: str, submit: Submit | None = None) -> Submit:
    """End the next search, or that of ``submit``, with texts whose scores are -1, -2 and so on."""
    submit = await stage.engine.accept_search(submit)
    found = [
        hypothesis(tokens_of(stage, text), score=-float(1 + rank), reason="stop")
        for rank, text in enumerate(texts)
    ]
    await stage.engine.step({})
    await stage.engine.end_search(submit, *found)
    return submit


async def submitted_search(stage: Stage, post: Any, **body: Any) -> Submit:
    """The Submit of a search, which is answered."""
    waiting = stage.spawn(post(use_beam_search=True, **body))
    submit = await stage.engine.read_submit()
    await answer_search(stage, *["x"] * submit.num_choices, submit=submit)
    assert (await waiting).status_code == 200
    return submit
