"""/v1/files: what batches read and write."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.files.answer_schema import UPLOAD, DeletedFileAnswer, FileAnswer, FilesAnswer
from gateway.files.content import FileContent
from gateway.files.records import FOR_BATCH, OF_BATCH
from gateway.files.store import FileStore
from gateway.files.upload import Upload
from gateway.http.call import call_of
from gateway.http.errors import bus_errors, invalid_value, overloaded
from gateway.http.pages import page_query, shown_page
from gateway.openai.endpoints.openapi_description import answers, bytes_of_file, reads_query
from gateway.service import Service

_MOST_FILES = 10_000  # that a call may ask for, as OpenAI has it
_PAGE_FILES = 1_000  # that it gets
_FULL_SHARE = 0.7  # of Redis' memory, below what stops new generations


def files_router(
    service: Service, files: FileStore, user_of: Callable[[str, str], Awaitable[str | None]]
) -> APIRouter:
    """The endpoints of files.

    Args:
        user_of: what reads a file of an API key, None if nothing does.
    """
    router = APIRouter(tags=["batches"], default_response_class=Response)

    @router.post(
        "/v1/files",
        openapi_extra=UPLOAD,
        responses=answers(FileAnswer, has_body=True),
    )
    async def create_file(request: Request) -> Response:
        """Keep a file of requests for a batch, one JSON map in each line."""
        with service.counting_refusals(), bus_errors():
            if service.models.memory_share > _FULL_SHARE:
                raise overloaded("Redis is short of memory; delete some files")
            info = await Upload(files, request).read()
            call_of(request).fields["file"] = info.id
            return JSONResponse(info.shown())

    where = reads_query(
        limit={"type": "integer", "minimum": 1, "maximum": _MOST_FILES},
        order={"type": "string", "enum": ["asc", "desc"]},
        after={"type": "string"},
        purpose={"type": "string", "enum": [FOR_BATCH, OF_BATCH]},
    )

    @router.get("/v1/files", openapi_extra=where, responses=answers(FilesAnswer, 400))
    async def list_files(request: Request) -> Response:
        """The files of this API key, the newest first."""
        with service.counting_refusals(), bus_errors():
            purpose = request.query_params.get("purpose")
            if purpose not in (None, FOR_BATCH, OF_BATCH):
                raise invalid_value("purpose", purpose, f"must be {FOR_BATCH} or {OF_BATCH}")
            query = page_query(request, _PAGE_FILES, _MOST_FILES)
            query = replace(query, limit=min(query.limit, _PAGE_FILES))
            found, has_more = await files.page(call_of(request).tenant, query, purpose)
            return JSONResponse(shown_page([info.shown() for info in found], has_more))

    _add_one(router, service, files, user_of)
    return router


def _add_one(
    router: APIRouter,
    service: Service,
    files: FileStore,
    user_of: Callable[[str, str], Awaitable[str | None]],
) -> None:
    """The endpoints of one file."""

    @router.get("/v1/files/{file_id}", responses=answers(FileAnswer, 404))
    async def get_file(file_id: str, request: Request) -> Response:
        """What a file is."""
        with service.counting_refusals(), bus_errors():
            info = await files.find(file_id, call_of(request).tenant)
            return JSONResponse(info.shown())

    @router.get("/v1/files/{file_id}/content", responses=bytes_of_file(404))
    async def get_content(file_id: str, request: Request) -> Response:
        """The bytes of a file."""
        with service.counting_refusals(), bus_errors():
            return FileContent(files, await files.find(file_id, call_of(request).tenant))

    @router.delete("/v1/files/{file_id}", responses=answers(DeletedFileAnswer, 400, 404))
    async def delete_file(file_id: str, request: Request) -> Response:
        """Forget a file, unless a batch still reads it."""
        with service.counting_refusals(), bus_errors():
            tenant = call_of(request).tenant
            info = await files.find(file_id, tenant)
            user = await user_of(tenant, file_id)
            if user is not None:
                raise invalid_value("file_id", file_id, f"{user} reads it; cancel that first")
            await files.delete(info)
            return JSONResponse({"id": file_id, "object": "file", "deleted": True})
