"""Sends a generation to its client, as a stream or in one piece, until the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers.events import joined_calls
from gateway.http.call import Call
from gateway.http.errors import ApiError, failed, taken_over
from gateway.openai.generation.generation import ClientLeft, Generation, TakenOver
from gateway.openai.generation.generation_output import GenerationOutput
from gateway.openai.generation.origin import Origin
from gateway.openai.generation.prepare import Prepared
from gateway.openai.responses.serializer import Serializer, Usage
from gateway.resume.event_ids import EventIds, StreamPosition
from gateway.resume.stream_ids import stream_id_of
from gateway.service import Service
from gateway.text.choice_text import Delta
from shared.logs import EventLog
from shared.messages.endings import FinishReason

_log = EventLog("gateway.openai.responses")
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_FEW_SCORED = 256  # tokens with log-probabilities, which take some 20 us each to serialize
_CLIENT_CLOSED = 499  # the access log's status of a client that left; never sent


BeforeEnd = Callable[[Sequence[Delta]], Awaitable[None]]
"""Takes all of each choice; nothing, if they were streamed."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a client that lost the stream can continue it."""

    stream_id: str
    window_s: float  # how long the generation runs on for a client that has left
    start: StreamPosition  # where this stream begins
    is_named: bool = True  # the client can come back without this answer's head


class StreamAnswer(Response):
    """Server-Sent Events while tokens arrive.

    A stream that does not end well has an error event at its end, and no ``[DONE]``.

    Args:
        resumption: None if the stream cannot be continued by another call.
        before_end: awaited when all is generated, before the last events are made.
    """

    def __init__(
        self,
        generation: Generation,
        serializer: Serializer,
        call: Call,
        resumption: Resumption | None = None,
        before_end: BeforeEnd | None = None,
    ) -> None:
        headers = dict(_STREAM_HEADERS)
        if resumption is not None:
            headers["X-Stream-URL"] = f"/v1/streams/{resumption.stream_id}"
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._generation = generation
        self._serializer = serializer
        self._output = generation.output
        self._call = call
        self._resumption = resumption
        self._before_end = before_end
        self._client_is_there = True
        self._ids: EventIds | None = None
        if resumption is not None:
            self._ids = EventIds(len(self._output.choices), resumption.start)

    async def accepted(self, receive: Receive) -> Response:
        """Wait until the engine has accepted the requests, and return the response to send.

        Raises:
            ApiError: the engine refused one.
        """
        generation = self._generation
        try:
            async with watch_disconnect(receive, generation.client_disconnected):
                await generation.accepted()
            return self
        except ClientLeft:
            generation.output.count_unfinished(FinishReason.ABORT)
            response = client_left(self._call)
        except BaseException as error:
            generation.output.count_unfinished(reason_of(error))
            self._close()
            raise
        self._close()
        _log_usage(self._call, generation.output)
        return response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, resumption = self._generation, self._resumption
        try:
            if resumption is not None and not resumption.is_named:
                # A client that has left before it was sent the stream's URL cannot come back.
                has_left = await Request(scope, receive).is_disconnected()
                resumption = None if has_left else resumption
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            if resumption is None:
                async with watch_disconnect(receive, generation.client_disconnected):
                    await self._send_deltas(send)
            else:
                await self._send_resumable(receive, send, resumption.window_s)
        except (ClientLeft, TimeoutError):
            self._call.status = _CLIENT_CLOSED
            generation.output.count_unfinished(FinishReason.ABORT)
        except TakenOver:
            self._call.fields["error"] = "taken over"
            generation.output.count_unfinished(FinishReason.ABORT)
            # A client that can resume has done so; any other must not take this for the end.
            error = b"" if self._ids is not None else self._serializer.error(taken_over())
            await self._send(send, error, more=False)
        except ApiError as error:
            self._call.fields["error"] = error
            generation.output.count_unfinished(reason_of(error))
            await self._send(send, self._serializer.error(error), more=False)
        except Exception as error:
            _log.exception("stream failed", id=self._call.id)
            self._call.fields["error"] = type(error).__name__
            generation.output.count_unfinished(FinishReason.ERROR)
            await self._send(send, self._serializer.error(failed("internal error")), more=False)
        finally:
            self._close()
            _log_usage(self._call, generation.output)

    def _close(self) -> None:
        """Close the generation, but let it run on where another call can continue it."""
        generation, resumption = self._generation, self._resumption
        if resumption is not None and generation.is_taken_over:
            generation.abandon(
                resumption.window_s
            )  # another call takes over one request after the other
        else:
            generation.close(abort=resumption is None or not generation.server_stops)

    async def _send_resumable(self, receive: Receive, send: Send, window_s: float) -> None:
        """Send the stream, and run on for ``window_s`` after the client has left.

        Raises:
            TimeoutError: no call continued the stream in that time.
        """
        async with asyncio.timeout(None) as limit:

            def start_window() -> None:
                self._client_is_there = False
                limit.reschedule(asyncio.get_running_loop().time() + window_s)

            async with watch_disconnect(receive, start_window):
                await self._send_deltas(send)

    async def _send_deltas(self, send: Send) -> None:
        output, ids = self._output, self._ids
        async with aclosing(self._generation.deltas()) as deltas:
            async for new in deltas:
                # Both are sums over the whole call, and so the same for all choices.
                usage = output.usage if output.display.continuous_usage else None
                cached_tokens = 0 if ids is None else output.cached_tokens
                data = [self._chunk(index, delta, usage, cached_tokens) for index, delta in new]
                shown = data[0] if len(data) == 1 else b"".join(data)
                if shown:
                    await self._send(send, shown, more=True)
        if self._before_end is not None:
            await self._before_end(())
        end = b""
        done = self._serializer.done(output.usage)
        has_usage = self._resumption is not None and self._resumption.start.has_usage
        if output.display.include_usage and not has_usage:
            end = self._serializer.usage_chunk(output.usage)
        if ids is not None:
            cached_tokens = output.cached_tokens
            end = end and ids.usage(end, cached_tokens)
            done = ids.done(done, cached_tokens)
        await self._send(send, end + done, more=False)

    def _chunk(self, index: int, delta: Delta, usage: Usage | None, cached_tokens: int) -> bytes:
        chunk = self._serializer.chunk(index, delta, usage)
        if self._ids is None:
            if len(chunk) == 1:
                return chunk[0].data
            return b"".join([event.data for event in chunk])
        return self._ids.chunk(index, delta, chunk, cached_tokens)

    async def _send(self, send: Send, body: bytes, more: bool) -> None:
        if self._client_is_there:
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def answer(
    service: Service,
    origin: Origin,
    prepared: Prepared,
    serializer: Serializer | None = None,
    before_end: BeforeEnd | None = None,
) -> Response:
    """Ask the engine for a generation, and return its response: a stream, or all of it.

    Args:
        serializer: of another format than the one that the generation's display names.
        before_end: awaited when all is generated, before the end of the response is made.

    Raises:
        ApiError: it is refused, or it failed before the response began.
    """
    generation, display = prepared.generation, prepared.display
    serializer = serializer or prepared.serializer()
    await prepared.submit(service.models)
    origin.call.route = generation.route
    if not prepared.is_stream:
        return await whole_answer(
            generation, serializer, origin.call, origin.receive, before_end=before_end
        )
    resumption = None
    if display.resumable:
        stream_id = stream_id_of(prepared.secret, origin.client)
        window_s, is_named = service.resume_window_s, prepared.is_repeatable
        resumption = Resumption(stream_id, window_s, StreamPosition(), is_named)
    stream = StreamAnswer(generation, serializer, origin.call, resumption, before_end)
    return await stream.accepted(origin.receive)


def client_left(call: Call) -> Response:
    """The response of a call whose client has left, which only the access log shows."""
    call.status = _CLIENT_CLOSED
    return Response(status_code=_CLIENT_CLOSED)


async def whole_body(
    generation: Generation, serializer: Serializer, before_end: BeforeEnd | None = None
) -> bytes:
    """Waits for a generation's end; the body of its answer in one piece.

    Raises:
        ApiError: it failed.
        ClientLeft, TakenOver: no client waits for it here any more.
    """
    output = generation.output
    await generation.accepted()
    candidates = await _collect(generation)
    choices = [candidates[index] for index in output.best()]
    if before_end is not None:
        await before_end(choices)
    prompts, usage = output.prompt_scores(), output.usage
    num_scored = sum(len(choice.scored) for choice in choices)
    if output.scores_prompts or num_scored > _FEW_SCORED:  # would block the event loop
        return await asyncio.to_thread(serializer.whole, choices, usage, prompts)
    return serializer.whole(choices, usage, prompts)


async def whole_answer(
    generation: Generation,
    serializer: Serializer,
    call: Call,
    receive: Receive,
    before_end: BeforeEnd | None = None,
) -> Response:
    """Waits for a generation's end and returns the answer in one piece.

    Raises:
        ApiError: the generation failed.
    """
    output = generation.output
    try:
        async with watch_disconnect(receive, generation.client_disconnected):
            body = await whole_body(generation, serializer, before_end)
        return Response(body, media_type="application/json")
    except ClientLeft:
        output.count_unfinished(FinishReason.ABORT)
        return client_left(call)
    except TakenOver:
        output.count_unfinished(FinishReason.ABORT)
        raise taken_over() from None
    except Exception as error:
        output.count_unfinished(reason_of(error))
        raise
    finally:
        generation.close()
        _log_usage(call, output)


def reason_of(error: BaseException) -> FinishReason:
    """The finish reason under which a generation that ends with this error is counted."""
    if not isinstance(error, ApiError) or error.status >= 500:
        return FinishReason.ERROR
    refused = error.rejection == FinishReason.OVERLOADED
    # The client's mistakes, and calls that a newer one took over, are no failures.
    return FinishReason.OVERLOADED if refused else FinishReason.ABORT


async def _collect(generation: Generation) -> list[Delta]:
    """All of each choice, by index."""
    deltas_by_choice: list[list[Delta]] = [[] for _ in generation.output.choices]
    async with aclosing(generation.deltas()) as deltas:
        async for new in deltas:
            for index, delta in new:
                deltas_by_choice[index].append(delta)
    return [_joined(deltas) for deltas in deltas_by_choice]


def _joined(deltas: list[Delta]) -> Delta:
    """Consecutive deltas of one choice as one."""
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        scored=[item for delta in deltas for item in delta.scored],
        finish_reason=deltas[-1].finish_reason,
        beam_score=deltas[-1].beam_score,
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=joined_calls(delta.calls for delta in deltas),
        has_calls=deltas[-1].has_calls,
    )


@asynccontextmanager
async def watch_disconnect(
    receive: Receive, on_disconnect: Callable[[], None]
) -> AsyncIterator[None]:
    """Call ``on_disconnect`` when the client closes its connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


def _log_usage(call: Call, output: GenerationOutput) -> None:
    """Add what was used to the call's line in the access log."""
    usage = output.usage
    call.fields["prompt_tokens"] = usage.prompt_tokens
    call.fields["completion_tokens"] = usage.completion_tokens
    call.fields["finish_reason"] = output.finish_reasons
