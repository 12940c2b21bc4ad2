"""/v1/batches: files of requests that are answered in the background."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.batches.answer_schema import BatchAnswer, BatchesAnswer
from gateway.batches.body import BatchBody, parse_batch_body
from gateway.batches.service import Batches
from gateway.http.call import call_of
from gateway.http.errors import bus_errors
from gateway.http.pages import page_query, shown_page
from gateway.openai.endpoints.openapi_description import answers, reads_query, takes
from gateway.service import Service

_FEW_BATCHES, _MOST_BATCHES = 20, 100  # on a page


def batches_router(service: Service, batches: Batches) -> APIRouter:
    """The endpoints of batches."""
    router = APIRouter(tags=["batches"], default_response_class=Response)

    @router.post(
        "/v1/batches",
        openapi_extra=takes(BatchBody),
        responses=answers(BatchAnswer, 404, has_body=True),
    )
    async def create_batch(request: Request) -> Response:
        """Answer the requests in a file, behind all others."""
        with service.counting_refusals(), bus_errors():
            body = await service.bodies.read(request, parse_batch_body)
            call = call_of(request)
            state = await batches.create(body, call.tenant)
            call.fields["batch"] = state.id
            return JSONResponse(state.shown())

    page = reads_query(
        limit={"type": "integer", "minimum": 1, "maximum": _MOST_BATCHES},
        after={"type": "string"},
        order={"type": "string", "enum": ["asc", "desc"]},
    )

    @router.get("/v1/batches", openapi_extra=page, responses=answers(BatchesAnswer, 400))
    async def list_batches(request: Request) -> Response:
        """The batches of this API key, the newest first."""
        with service.counting_refusals(), bus_errors():
            query = page_query(request, _FEW_BATCHES, _MOST_BATCHES)
            found, has_more = await batches.store.page(call_of(request).tenant, query)
            return JSONResponse(shown_page([state.shown() for state in found], has_more))

    @router.get("/v1/batches/{batch_id}", responses=answers(BatchAnswer, 404))
    async def get_batch(batch_id: str, request: Request) -> Response:
        """How far a batch has come."""
        with service.counting_refusals(), bus_errors():
            state = await batches.store.find(batch_id, call_of(request).tenant)
            return JSONResponse(state.shown())

    @router.post("/v1/batches/{batch_id}/cancel", responses=answers(BatchAnswer, 400, 404))
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        """End a batch; what was answered until then is kept."""
        with service.counting_refusals(), bus_errors():
            return JSONResponse((await batches.cancel(batch_id, call_of(request).tenant)).shown())

    return router
