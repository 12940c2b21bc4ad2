"""GET /v1/streams/<id>: the rest of a stream, from any gateway. DELETE ends it."""

from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.engine.events import Attached
from gateway.http.call import call_of, client_of
from gateway.http.errors import gone, invalid, shutting_down, unavailable, unknown_stream
from gateway.models.served_model import ServedModel
from gateway.openai.endpoints.openapi_description import continues, ends, reads_header
from gateway.openai.generation.generation import ClientLeft, Generation
from gateway.openai.generation.generation_output import GenerationOutput
from gateway.openai.responses.answers import Resumption, StreamAnswer, client_left
from gateway.prompts.prompt import Prompt
from gateway.resume.event_ids import StreamPosition
from gateway.resume.request_lookup import RequestLookup
from gateway.resume.stream_context import Display, read_display, request_id
from gateway.resume.stream_ids import call_id_in
from gateway.service import Service
from gateway.tracing.trace_context import TraceContext
from shared.messages.requests import Submit
from shared.sampling import SamplingParams

_NOTHING_LEFT = 204  # clients of Server-Sent Events do not reconnect after it
_FORGOTTEN = "the stream is not remembered any more, if there ever was one"


def streams_router(service: Service) -> APIRouter:
    """The endpoint that continues streams."""
    router = APIRouter(tags=["generate"], default_response_class=Response)
    last = reads_header("Last-Event-ID", "The last event that was seen.")

    @router.get("/v1/streams/{stream_id}", openapi_extra=last, responses=continues())
    async def resume_stream(stream_id: str, request: Request) -> Response:
        """Continue a stream after the event that ``Last-Event-ID`` names, or from its beginning."""
        return await _resume(service, stream_id, request)

    @router.delete("/v1/streams/{stream_id}", status_code=204, responses=ends())
    async def end_stream(stream_id: str, request: Request) -> Response:
        """End a stream at once; what it still generates is aborted.

        Without it, a stream goes on for a while after its connection is closed.
        """
        return await _end(service, stream_id, request)

    return router


async def _resume(service: Service, stream_id: str, request: Request) -> Response:
    call_id = call_id_in(stream_id, client_of(request))
    if call_id is None:
        raise unknown_stream()
    position = StreamPosition.parse(request.headers.get("last-event-id"))
    if position.is_done:
        return Response(status_code=_NOTHING_LEFT)
    if service.draining:
        raise shutting_down(accepted=False)
    model = await _model_of(service, call_id)
    try:
        return await _taken_up(service, model, stream_id, call_id, request, position)
    except ClientLeft:
        return client_left(call_of(request))


async def _end(service: Service, stream_id: str, request: Request) -> Response:
    call_id = call_id_in(stream_id, client_of(request))
    if call_id is None:
        raise unknown_stream()
    model = await _model_of(service, call_id)
    lookup = RequestLookup(model.engine, request.receive)
    try:
        await _found(lookup, call_id, StreamPosition.parse(None), service.max_prompts)
    except ClientLeft:
        return client_left(call_of(request))
    finally:
        lookup.abandon(0.0)
    return Response(status_code=_NOTHING_LEFT)


async def _model_of(service: Service, call_id: str) -> ServedModel:
    """The model of a stream.

    Raises:
        ApiError: 410, the stream is forgotten; 503, its engine is away.
    """
    model = await service.models.owner(call_id)
    if model is None:
        raise gone(_FORGOTTEN)
    if not model.engine.is_positioned:
        raise unavailable("the log of outputs was not found yet")
    return model


async def _taken_up(
    service: Service,
    model: ServedModel,
    stream_id: str,
    call_id: str,
    request: Request,
    position: StreamPosition,
) -> Response:
    lookup = RequestLookup(model.engine, request.receive)
    try:
        display, found = await _found(lookup, call_id, position, service.max_prompts)
        resumption = Resumption(stream_id, service.resume_window_s, position)
        answer = _continued(model, request, display, found, resumption)
    except BaseException:
        lookup.abandon(service.resume_window_s)
        raise
    lookup.close()
    return answer


async def _found(
    lookup: RequestLookup, call_id: str, position: StreamPosition, max_prompts: int
) -> tuple[Display, list[Attached | None]]:
    """How the stream is shown, and the engine's state of its requests.

    Raises:
        ApiError: 410, one request is forgotten, and the client does not have all of it; 404, the
            stream cannot be resumed; 400, the position belongs to another stream.
    """
    found = await lookup.find([call_id])
    if found == [None] and position.choices and position.choices[0].ended:
        # The state of any other request shows how many prompts there are.
        most = min(len(position.choices), max_prompts)
        found += await lookup.find([request_id(call_id, number) for number in range(1, most)])
    first = next((state for state in found if state is not None), None)
    if first is None:
        raise gone(_FORGOTTEN)
    display = read_display(first.submit.display)
    if display is None or not display.resumable:
        raise unknown_stream()
    each = display.output.num_candidates
    if position.choices and len(position.choices) != display.num_prompts * each:
        raise invalid(
            "Last-Event-ID",
            f"Last-Event-ID: it is of a stream with {len(position.choices)} choices, "
            f"this one has {display.num_prompts * each}",
        )
    others = range(len(found), display.num_prompts)
    found += await lookup.find([request_id(call_id, number) for number in others])
    del found[display.num_prompts :]
    for number, state in enumerate(found):
        seen = position.choices[number * each : (number + 1) * each]
        if state is None and not (seen and all(choice.ended for choice in seen)):
            raise gone(_FORGOTTEN)
    return display, found


def _continued(
    model: ServedModel,
    request: Request,
    display: Display,
    found: Sequence[Attached | None],
    resumption: Resumption,
) -> Response:
    position = resumption.start
    call = call_of(request)
    call.fields |= {"model": model.name, "stream": True, "resumes": display.call_id}
    call.continues = next(
        (TraceContext.parse(state.submit.traceparent) for state in found if state is not None), None
    )
    prompts = [_prompt(state) for state in found]
    submits = [
        _forgotten_submit(request_id(display.call_id, number)) if state is None else state.submit
        for number, state in enumerate(found)
    ]
    output = GenerationOutput(
        model.tokenizer,
        model.metrics,
        display,
        prompts,
        submits,
        call.started_s,
        model.answers,
    )
    generation = Generation(model.engine, model.metrics, output)
    serializer = display.serializer(model.tokenizer, [prompt.tokens for prompt in prompts])
    serializer.resume(index for index, choice in enumerate(position.choices) if choice.begun)
    try:
        generation.resume(found, position)
    except BaseException:
        generation.abandon(resumption.window_s)
        raise
    return StreamAnswer(generation, serializer, call, resumption)


def _prompt(state: Attached | None) -> Prompt:
    """The prompt of a request, from what its first gateway sent to the engine."""
    if state is None:  # the client has all of the answer, so the prompt does not matter
        return Prompt([], None, "prompt")
    tokens = state.submit.prompt.tolist()
    own = read_display(state.submit.display)
    if own is None:
        return Prompt(tokens, None, "prompt")
    scores_last = own.scored_token is not None
    if scores_last:
        tokens.append(own.scored_token)
    return Prompt(tokens, own.prompt_text, "prompt", scores_last)


def _forgotten_submit(identity: str) -> Submit:
    """Stands for the Submit of a request that the engine has forgotten; it is never sent."""
    return Submit(
        request_id=identity,
        gateway="",
        attachment="",
        prompt=np.empty(0, np.int32),
        sampling=SamplingParams.greedy(1),
        received_ms=0,
        num_choices=1,
        priority=0,
        cache_salt="",
    )
