"""What clients see of stored responses."""

import asyncio
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from gateway.http.errors import invalid_value
from gateway.models.model_table import ModelTable
from gateway.openai.generation.token_feed import TokenFeed
from gateway.responses.events import ResponseView
from gateway.responses.output_items import item_id
from gateway.responses.records import ResponseAsked
from gateway.responses.request.body import ResponseBody, parse_response_body
from gateway.responses.request.conversation import items_of
from gateway.responses.request.input_items import InputItem, Message
from gateway.responses.store import ResponseStore, StoredResponse

_FEW_TOKENS = 256  # some 20 us each
_FEW_BYTES = 16 * 2**10
_MOST_TURNS = 1_000  # that a response goes back to
_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


class ResponseViews:
    """Makes views of responses."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models

    def of(self, asked: ResponseAsked, body: ResponseBody | None = None) -> ResponseView:
        """A view of a response without tokens.

        Raises:
            ApiError: 503, its model is not served now.
        """
        body = body or parse_response_body(asked.body)
        model = self._models.kept(body.model)
        return ResponseView(asked, body, TokenFeed(model, asked.submit), model.tokenizer)

    async def object_of(self, found: StoredResponse) -> dict[str, Any]:
        """The response as an object."""
        view = await self._read(found)
        if found.ended is not None:
            return view.shown()
        return view.shown("in_progress" if found.tokens else "queued")

    async def input_of(self, found: StoredResponse) -> list[dict[str, Any]]:
        """The items that were asked with, each with an id."""
        view = await self._read(found)
        return shown_input(view.asked.id, items_of(view.body.input))

    async def history(
        self, store: ResponseStore, response_id: str | None, tenant: str
    ) -> list[InputItem]:
        """All items up to the end of a response, oldest first.

        Raises:
            ApiError: 404, one of the responses is not there; 400, it has not ended.
        """
        turns: list[list[InputItem]] = []
        field = "previous_response_id"
        while response_id is not None:
            found = await store.find(response_id, tenant, field)
            if found.ended is None:
                raise invalid_value(field, response_id, "this response goes on; wait for its end")
            if len(turns) == _MOST_TURNS:
                raise invalid_value(field, response_id, f"{_MOST_TURNS} responses precede this one")
            view = await self._read(found)
            output = [_as_input(item) for item in view.shown()["output"]]
            turns.append([*items_of(view.body.input), *output])
            response_id = view.body.previous_response_id
        return [item for turn in reversed(turns) for item in turn]

    async def _read(self, found: StoredResponse) -> ResponseView:
        assert found.asked is not None
        if len(found.tokens) <= _FEW_TOKENS and len(found.asked.body) <= _FEW_BYTES:
            return self._read_now(found)
        return await asyncio.to_thread(self._read_now, found)

    def _read_now(self, found: StoredResponse) -> ResponseView:
        assert found.asked is not None
        view = self.of(found.asked)
        for delta in view.feed.push(found.tokens, found.logprobs):
            for _ in view.add(delta):
                pass
        if found.ended is not None:
            for _ in view.end(found.ended):
                pass
        return view


def shown_input(response_id: str, items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Items of a response's input, as clients see them."""
    shown = []
    for index, item in enumerate(items):
        fields: dict[str, Any] = item.model_dump(exclude_none=True)
        if isinstance(item, Message) and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": kind, "text": item.content}]
        fields.setdefault("id", item_id(response_id, "input", index))
        fields.setdefault("status", "completed")
        shown.append(fields)
    return shown


def _as_input(item: dict[str, Any]) -> InputItem:
    """An item of an answer as one of a later input."""
    kept = {name: value for name, value in item.items() if name not in ("id", "status")}
    return _ITEM.validate_python(kept)
