"""Sends a generation to its client, as a stream or in one piece, and notices when it leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.engine.event_queue import ClientDisconnected
from gateway.http.call import Call
from gateway.http.errors import ApiError, failed, taken_over
from gateway.openai.generation import ClientLeft, Generation, TakenOver
from gateway.openai.serializers import DONE, Usage, Wire, error_event
from gateway.resume.event_ids import EventIds, StreamPosition
from gateway.resume.stream_context import Display
from gateway.text.choice import Delta
from shared.logs import EventLog
from shared.messages.endings import FinishReason

_log = EventLog("gateway.openai.responses")
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_FEW_SCORED = 256  # tokens with log-probabilities, which take some 20 us each to write
_CLIENT_CLOSED = 499  # never sent: what the access log says of a client that left


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a stream can be continued by whoever loses it."""

    stream_id: str
    window_s: float  # how long it is kept for a client that has left
    start: StreamPosition  # where it begins itself


class StreamAnswer(Response):
    """Server-Sent Events while tokens arrive.

    A stream that does not end well has an error event at its end, and no ``[DONE]``.

    Args:
        resumption: None unless the client may come back for the rest.
    """

    def __init__(
        self,
        generation: Generation,
        wire: Wire,
        display: Display,
        call: Call,
        resumption: Resumption | None = None,
    ) -> None:
        headers = dict(_STREAM_HEADERS)
        if resumption is not None:
            headers["X-Stream-URL"] = f"/v1/streams/{resumption.stream_id}"
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._generation = generation
        self._wire = wire
        self._display = display
        self._call = call
        self._resumption = resumption
        self._is_read = True
        self._ids: EventIds | None = None
        if resumption is not None:
            self._ids = EventIds(generation.num_candidates, resumption.start)

    async def accepted(self, receive: Receive) -> Response:
        """This answer, which does not begin before the engine has taken the request.

        Raises:
            ApiError: the engine refused it.
        """
        generation = self._generation
        try:
            async with watching(receive, lambda: generation.queue.put(ClientDisconnected())):
                await generation.accepted()
            return self
        except ClientLeft:
            generation.note_unfinished(FinishReason.ABORT)
            response = client_left(self._call)
        except BaseException as error:
            generation.note_unfinished(_reason(error))
            self._let_go()
            raise
        self._let_go()
        _note(self._call, generation)
        return response

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
            if self._resumption is None:
                async with watching(receive, lambda: generation.queue.put(ClientDisconnected())):
                    await self._send_deltas(send)
            else:
                await self._outlive_client(receive, send, self._resumption.window_s)
        except (ClientLeft, TimeoutError):
            self._call.status = _CLIENT_CLOSED
            generation.note_unfinished(FinishReason.ABORT)
        except TakenOver:
            self._call.fields["error"] = "taken over"
            generation.note_unfinished(FinishReason.ABORT)
            # Who can resume a stream has done so; anybody else must not take this for its end.
            error = b"" if self._ids is not None else error_event(taken_over().body())
            await self._send(send, error, more=False)
        except ApiError as error:
            self._call.fields["error"] = error
            generation.note_unfinished(_reason(error))
            await self._send(send, error_event(error.body()), more=False)
        except Exception as error:
            _log.exception("stream failed", id=self._call.id)
            self._call.fields["error"] = type(error).__name__
            generation.note_unfinished(FinishReason.ERROR)
            await self._send(send, error_event(failed("internal error").body()), more=False)
        finally:
            self._let_go()
            _note(self._call, generation)

    def _let_go(self) -> None:
        """What another call can go on with is not to end with this one."""
        generation, resumption = self._generation, self._resumption
        if resumption is not None and generation.is_taken_over:
            generation.abandon(resumption.window_s)  # request by request is taken over
        else:
            generation.close(abort=resumption is None or not generation.server_leaves)

    async def _outlive_client(self, receive: Receive, send: Send, window_s: float) -> None:
        """Keep the generation going for a client that may come back, here or elsewhere.

        Raises:
            TimeoutError: it did not.
        """
        async with asyncio.timeout(None) as limit:

            def left() -> None:
                self._is_read = False
                limit.reschedule(asyncio.get_running_loop().time() + window_s)

            async with watching(receive, left):
                await self._send_deltas(send)

    async def _send_deltas(self, send: Send) -> None:
        generation = self._generation
        async with aclosing(generation.deltas()) as deltas:
            async for shown in deltas:
                # Of the whole call, and so the same for all choices that go on now.
                usage = generation.usage if self._display.continuous_usage else None
                cached_tokens = generation.cached_tokens
                data = [self._chunk(index, delta, usage, cached_tokens) for index, delta in shown]
                await self._send(send, data[0] if len(data) == 1 else b"".join(data), more=True)
        end = b""
        done = DONE
        has_usage = self._resumption is not None and self._resumption.start.has_usage
        if self._display.include_usage and not has_usage:
            end = self._wire.usage_chunk(generation.usage)
        if self._ids is not None:
            cached_tokens = generation.cached_tokens
            end = end and self._ids.usage(end, cached_tokens)
            done = self._ids.done(done, cached_tokens)
        await self._send(send, end + done, more=False)

    def _chunk(self, index: int, delta: Delta, usage: Usage | None, cached_tokens: int) -> bytes:
        chunk = self._wire.chunk(index, delta, usage)
        if self._ids is None:
            if len(chunk) == 1:
                return chunk[0].data
            return b"".join([event.data for event in chunk])
        return self._ids.chunk(index, delta, chunk, cached_tokens)

    async def _send(self, send: Send, body: bytes, more: bool) -> None:
        if self._is_read:
            await send({"type": "http.response.body", "body": body, "more_body": more})


def client_left(call: Call) -> Response:
    """For a client that will not see it; the access log says so."""
    call.status = _CLIENT_CLOSED
    return Response(status_code=_CLIENT_CLOSED)


async def whole_answer(
    generation: Generation, wire: Wire, call: Call, receive: Receive
) -> Response:
    """The answer in one piece.

    Raises:
        ApiError: the generation failed.
    """
    try:
        async with watching(receive, lambda: generation.queue.put(ClientDisconnected())):
            await generation.accepted()
            candidates = await _collect(generation)
        choices = [candidates[index] for index in generation.best()]
        prompts, usage = generation.prompt_scores(), generation.usage
        num_scored = sum(len(choice.scored) for choice in choices)
        if generation.scores_prompts or num_scored > _FEW_SCORED:  # too much to write on the loop
            answer = await asyncio.to_thread(wire.whole, choices, usage, prompts)
        else:
            answer = wire.whole(choices, usage, prompts)
        return Response(answer, media_type="application/json")
    except ClientLeft:
        generation.note_unfinished(FinishReason.ABORT)
        return client_left(call)
    except TakenOver:
        generation.note_unfinished(FinishReason.ABORT)
        raise taken_over() from None
    except Exception as error:
        generation.note_unfinished(_reason(error))
        raise
    finally:
        generation.close()
        _note(call, generation)


def _reason(error: BaseException) -> FinishReason:
    """What a generation that ends with this counts as."""
    if not isinstance(error, ApiError) or error.status >= 500:
        return FinishReason.ERROR
    refused = error.rejection == FinishReason.OVERLOADED
    # What the client did wrong, or elsewhere once more, is no failure of a generation.
    return FinishReason.OVERLOADED if refused else FinishReason.ABORT


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
async def watching(receive: Receive, left: Callable[[], None]) -> AsyncIterator[None]:
    """Say so when the client closes its connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


def _note(call: Call, generation: Generation) -> None:
    usage = generation.usage
    call.fields["prompt_tokens"] = usage.prompt_tokens
    call.fields["completion_tokens"] = usage.completion_tokens
    call.fields["finish_reason"] = generation.finish_reasons
