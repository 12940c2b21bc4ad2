"""From the body of a response to a generation that the engine can be asked for."""

from gateway.openai.generation.origin import Origin
from gateway.openai.generation.prepare import Prepared, prepare_chat
from gateway.responses.records import ResponseAsked
from gateway.responses.request.body import ResponseBody
from gateway.responses.request.chat_request import NAMES, chat_body
from gateway.responses.request.conversation import items_of
from gateway.responses.service import Responses
from gateway.service import Service


async def prepare_response(
    service: Service, responses: Responses, origin: Origin, body: ResponseBody, data: bytes
) -> tuple[Prepared, ResponseAsked]:
    """The generation of a response, and what is kept of the call.

    Args:
        data: the body as it came.

    Raises:
        ApiError: the body is refused, or the engine is away.
    """
    tenant = origin.call.tenant
    history = await responses.views.history(responses.store, body.previous_response_id, tenant)
    chat = chat_body(body, [*history, *items_of(body.input)])
    with NAMES.used():
        prepared = await prepare_chat(service, origin, chat)
    [request] = prepared.generation.output.requests
    display = prepared.display
    asked = ResponseAsked(f"resp_{display.call_id}", tenant, data, display.created, request.submit)
    return prepared, asked
