"""Streams of completions, read event by event."""

import asyncio
import json
from collections.abc import AsyncIterator

from tests.gateway.conftest import Stage, events


class Stream:
    """A streamed completion, read event by event; its answer begins when the engine accepts."""

    def __init__(self, stage: Stage, **body: object) -> None:
        self._request = stage.http.stream(
            "POST", "/v1/completions", json={"model": "demo", "prompt": "Hi", "stream": True} | body
        )
        self.text = ""
        self.raw = ""

    async def __aenter__(self) -> "Stream":
        self._opening = asyncio.ensure_future(self._request.__aenter__())
        self._chunks = self._read()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._opening
        await self._request.__aexit__(None, None, None)

    async def _read(self) -> AsyncIterator[str]:
        async for chunk in (await self._opening).aiter_text():
            yield chunk

    async def read_text(self, length: int) -> str:
        """The next events, until there is so much text altogether."""
        while len(self.text) < length:
            chunk = await asyncio.wait_for(anext(self._chunks), 5)
            self.raw += chunk
            for event in events(chunk):
                self.text += json.loads(event)["choices"][0]["text"]
        return self.text

    async def rest(self) -> list[str]:
        """All events that remain."""
        return events("".join([chunk async for chunk in self._chunks]))


def tokens_of(stage: Stage, text: str) -> list[int]:
    return stage.tokenizer.encode(text, add_special_tokens=False)


async def finish(stream: Stream, text: str) -> None:
    """The stream has this text altogether, and a good end."""
    *chunks, done = await stream.rest()
    assert done == "[DONE]"
    assert stream.text + "".join(json.loads(c)["choices"][0]["text"] for c in chunks) == text
