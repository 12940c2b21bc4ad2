"""What the engine is asked for a line of a batch, by endpoint."""

from functools import partial
from typing import TypeVar

from gateway.batches.validation import CALLER
from gateway.http.errors import invalid_value
from gateway.openai.generation.origin import Origin
from gateway.openai.generation.prepare import Prepared, prepare_chat, prepare_completion
from gateway.openai.requests.schema import ChatBody, CompletionBody, GenerationBody, parse_body
from gateway.openai.responses.serializer import Serializer
from gateway.responses.prepare import prepare_response
from gateway.responses.request.body import ResponseBody, parse_response_body
from gateway.responses.serializer import ResponseSerializer
from gateway.responses.service import Responses
from gateway.service import Service

_B = TypeVar("_B", bound=GenerationBody)


class LineRequests:
    """Makes the generations of lines, with the checks of a call."""

    def __init__(self, service: Service, responses: Responses) -> None:
        self._service = service
        self._responses = responses

    async def prepare(
        self, endpoint: str, origin: Origin, data: bytes
    ) -> tuple[Prepared, Serializer]:
        """The generation for a body, and the serializer of its answer.

        Raises:
            ApiError: the body is refused, or the engine is away.
        """
        service = self._service
        if endpoint == "/v1/responses":
            return await self._response(origin, data)
        if endpoint == "/v1/chat/completions":
            prepared = await prepare_chat(service, origin, await self._body(ChatBody, data))
        else:
            body = await self._body(CompletionBody, data)
            prepared = await prepare_completion(service, origin, body)
        return prepared, prepared.serializer()

    async def _body(self, cls: type[_B], data: bytes) -> _B:
        body = await self._service.bodies.parse(CALLER, data, partial(parse_body, cls))
        _check(body.stream, body.priority)
        return body

    async def _response(self, origin: Origin, data: bytes) -> tuple[Prepared, Serializer]:
        body: ResponseBody = await self._service.bodies.parse(CALLER, data, parse_response_body)
        _check(body.stream, body.priority)
        for field in ("background", "store"):
            if getattr(body, field):
                raise invalid_value(field, True, "not in a batch: its answers are kept in a file")
        service, responses = self._service, self._responses
        service.ready_engine(service.models.named(body.model))
        prepared, asked = await prepare_response(service, responses, origin, body, data)
        view = responses.views.of(asked, body)
        view.is_kept = False
        return prepared, ResponseSerializer(view)


def _check(stream: bool | None, priority: int | None) -> None:
    """Refuse what a line of a batch cannot have.

    Raises:
        ApiError: 400.
    """
    if stream:
        raise invalid_value("stream", True, "not in a batch: its answers are lines of a file")
    if priority is not None:
        raise invalid_value("priority", priority, "batches have the lowest")
