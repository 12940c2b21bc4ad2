"""Sends a generation to its client, as a stream or in one piece, and notices when it leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.call import Call
from gateway.choices import Delta
from gateway.errors import ApiError, failed
from gateway.generation import ClientLeft, Generation
from gateway.mailbox import ClientGone, Mailbox
from gateway.wire import DONE, Wire, error_event
from shared.logs import EventLog
from shared.messages import FinishReason

_log = EventLog("gateway.answers")
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_CLIENT_CLOSED = 499  # never sent: what the access log says of a client that left


class StreamAnswer(Response):
    """Server-Sent Events while tokens arrive.

    A stream that does not end well has an error event at its end, and no ``[DONE]``.
    """

    def __init__(self, generation: Generation, wire: Wire, include_usage: bool, call: Call) -> None:
        super().__init__(media_type="text/event-stream", headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._generation = generation
        self._wire = wire
        self._include_usage = include_usage
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        generation = self._generation
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async with _watching(receive, generation.mailbox):
                await self._send_deltas(send)
        except ClientLeft:
            self._call.status = _CLIENT_CLOSED
            generation.note_unfinished(FinishReason.ABORT)
        except ApiError as error:
            self._call.fields["error"] = error
            generation.note_unfinished(_reason(error))
            await _send_body(send, error_event(error.body()), more=False)
        except Exception as error:
            _log.exception("stream failed", id=self._call.id)
            self._call.fields["error"] = type(error).__name__
            generation.note_unfinished(FinishReason.ERROR)
            await _send_body(send, error_event(failed("internal error").body()), more=False)
        finally:
            generation.close()
            _note(self._call, generation)

    async def _send_deltas(self, send: Send) -> None:
        async with aclosing(self._generation.deltas()) as deltas:
            async for shown in deltas:
                body = b"".join(self._wire.chunk(index, delta) for index, delta in shown)
                await _send_body(send, body, more=True)
        usage = b""
        if self._include_usage:
            usage = self._wire.usage_chunk(self._generation.usage)
        await _send_body(send, usage + DONE, more=False)


async def stream_answer(
    generation: Generation, wire: Wire, include_usage: bool, call: Call, receive: Receive
) -> Response:
    """The answer as a stream, which does not begin before the engine has taken the request.

    Raises:
        ApiError: the engine refused it.
    """
    try:
        async with _watching(receive, generation.mailbox):
            await generation.accepted()
        return StreamAnswer(generation, wire, include_usage, call)
    except ClientLeft:
        generation.note_unfinished(FinishReason.ABORT)
        call.status = _CLIENT_CLOSED
        response = Response(status_code=_CLIENT_CLOSED)
    except BaseException as error:
        generation.note_unfinished(_reason(error))
        generation.close()
        raise
    generation.close()
    _note(call, generation)
    return response


async def whole_answer(
    generation: Generation, wire: Wire, call: Call, receive: Receive
) -> Response:
    """The answer in one piece.

    Raises:
        ApiError: the generation failed.
    """
    try:
        async with _watching(receive, generation.mailbox):
            candidates = await _collect(generation)
        choices = [candidates[index] for index in generation.best()]
        return Response(wire.whole(choices, generation.usage), media_type="application/json")
    except ClientLeft:
        generation.note_unfinished(FinishReason.ABORT)
        call.status = _CLIENT_CLOSED
        return Response(status_code=_CLIENT_CLOSED)
    except Exception as error:
        generation.note_unfinished(_reason(error))
        raise
    finally:
        generation.close()
        _note(call, generation)


def _reason(error: BaseException) -> FinishReason:
    """What a generation that ends with this counts as."""
    refused = isinstance(error, ApiError) and error.rejection == FinishReason.OVERLOADED
    return FinishReason.OVERLOADED if refused else FinishReason.ERROR


async def _collect(generation: Generation) -> list[Delta]:
    parts: list[list[Delta]] = [[] for _ in range(generation.num_candidates)]
    async with aclosing(generation.deltas()) as deltas:
        async for shown in deltas:
            for index, delta in shown:
                parts[index].append(delta)
    return [_joined(deltas) for deltas in parts]


def _joined(deltas: list[Delta]) -> Delta:
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        scored=[item for delta in deltas for item in delta.scored],
        finish_reason=deltas[-1].finish_reason,
        beam_score=deltas[-1].beam_score,
    )


@asynccontextmanager
async def _watching(receive: Receive, mailbox: Mailbox) -> AsyncIterator[None]:
    """Tell the generation when the client closes its connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        mailbox.put(ClientGone())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def _send_body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _note(call: Call, generation: Generation) -> None:
    usage = generation.usage
    call.fields["prompt_tokens"] = usage.prompt_tokens
    call.fields["completion_tokens"] = usage.completion_tokens
    call.fields["finish_reason"] = generation.finish_reasons
