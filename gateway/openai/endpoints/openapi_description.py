"""Adds request and response bodies to the OpenAPI description that FastAPI generates.

FastAPI cannot derive them: the endpoints read and write bodies by themselves, so that all errors
have OpenAI's format and no more than the limit is held in memory.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.openai.responses.schema import ErrorAnswer

_REF = "#/components/schemas/{model}"
_METHODS = ("get", "post", "delete")
_REQUEST_ID = {
    "X-Request-Id": {
        "description": "The one of the call if it had one, else an id that all services log.",
        "schema": {"type": "string"},
    }
}
_ENGINE = {
    "X-Engine": {
        "description": "In a fleet: the engine that answers, the reason of the choice, and the "
        "tokens of the prompt that it probably has cached.",
        "schema": {"type": "string"},
    }
}
_RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds after which it may work.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_STREAM_URL = {
    "X-Stream-URL": {
        "description": "Where a stream that was asked for with stream_resume can be continued.",
        "schema": {"type": "string"},
    }
}
# Schema of each event of a stream; it has an id if the stream can be resumed.
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "id": {"type": "string"}},
    "required": ["data"],
}
_ERRORS = {
    400: "The request can never work as it stands.",
    401: "No API key, or none that is known.",
    404: "There is no such thing.",
    408: "The request did not arrive in time.",
    409: "A newer call delivers the same generation.",
    410: "What could be continued once is not remembered any more.",
    413: "The body is too large.",
    415: "The body is compressed.",
    422: "The Idempotency-Key was used with another body.",
    429: "Too much is in progress or waiting already.",
    431: "The request line and headers are too large.",
    500: "An accepted generation failed.",
    503: "There is no engine, or no connection left, or the gateway is shutting down.",
}
_ANYWHERE = (401, 408, 429, 431, 503)
_OF_BODIES = (400, 413, 415)
_MAY_BE_RETRIED = (429, 503)


def takes(*bodies: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint whose body is one of these models."""
    refs = [{"$ref": _REF.format(model=body.__name__)} for body in bodies]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def reads_header(name: str, text: str, **limits: int) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint that reads this header."""
    schema = {"type": "string", **limits}
    header = {"name": name, "in": "header", "required": False, "description": text}
    return {"parameters": [header | {"schema": schema}]}


def reads_query(**schemas: Mapping[str, Any]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint that reads these parameters of the query."""
    found = [
        {"name": name, "in": "query", "required": False, "schema": dict(schema)}
        for name, schema in schemas.items()
    ]
    return {"parameters": found}


def answers(
    body: Any, *errors: int, has_body: bool = False, unready: Any = ErrorAnswer
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint: success with a body of this model, and errors.

    Args:
        errors: statuses besides those of every endpoint.
        has_body: the request has a body.
        unready: model of the body of a 503.
    """
    described: dict[int | str, dict[str, Any]] = {
        200: {"model": body, "description": "Success.", "headers": _REQUEST_ID}
    }
    for status in sorted({*_ANYWHERE, *errors, *(_OF_BODIES if has_body else ())}):
        described[status] = {
            "model": unready if status == 503 else ErrorAnswer,
            "description": _ERRORS[status],
            "headers": _REQUEST_ID | (_RETRY_AFTER if status in _MAY_BE_RETRIED else {}),
        }
    return described


def generates(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint that generates text, in one piece or as a stream."""
    return gives_stream(body, 404, 409, 422, 500, has_body=True)


def gives_stream(
    body: type[BaseModel], *errors: int, has_body: bool = False
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint that gives a body, or a stream; arguments as of ``answers``."""
    described = answers(body, *errors, has_body=has_body)
    return described | {200: described[200] | streams()}


def streams() -> dict[str, Any]:
    """A response of Server-Sent Events."""
    text = (
        "Server-Sent Events; data: [DONE] is the last one of a stream that ended well, and an "
        "object with the field error the last one of any other."
    )
    return {
        "description": "Success. A stream is written as " + text,
        "headers": _REQUEST_ID | _STREAM_URL | _ENGINE,
        "content": {"text/event-stream": {"schema": _EVENT}},
    }


def continues() -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint that continues streams."""
    described = answers(ErrorAnswer, 400, 404, 409, 410)
    nothing = {"description": "There is nothing after this event.", "headers": _REQUEST_ID}
    return described | {200: streams(), 204: nothing}


def ends() -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint that ends streams."""
    described = answers(ErrorAnswer, 404, 409, 410)
    del described[200]
    return described | {204: {"description": "The stream has ended.", "headers": _REQUEST_ID}}


def bytes_of_file(*errors: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint that returns what a file holds."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    found = {"description": "Success.", "headers": _REQUEST_ID, "content": content}
    return answers(ErrorAnswer, *errors) | {200: found}


def plain_text(media_type: str) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint that returns plain text."""
    described = answers(ErrorAnswer)
    text = {
        "description": "Success.",
        "headers": _REQUEST_ID,
        "content": {media_type: {"schema": {"type": "string"}}},
    }
    return described | {200: text}


def describe(
    app: FastAPI,
    bodies: list[type[BaseModel]],
    keys_are_required: bool,
    open_paths: tuple[str, ...],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """The OpenAPI description of ``app``, with the schemas of all bodies.

    Args:
        defaults: the model's, of sampling parameters.
        open_paths: paths that never need an API key.
    """
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    components = described.setdefault("components", {})
    known: dict[str, Any] = components.setdefault("schemas", {})
    known.update(schemas["$defs"])
    for body in bodies:
        for name, value in defaults.items():
            if name in known[body.__name__]["properties"]:
                known[body.__name__]["properties"][name]["default"] = value
    for name in ("HTTPValidationError", "ValidationError"):
        known.pop(name, None)
    components["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    for path, item in described["paths"].items():
        for method in _METHODS:
            if method in item:
                _drop_fastapis_own(item[method]["responses"])
                needs_key = keys_are_required and path not in open_paths
                item[method]["security"] = [{"api_key": []}] if needs_key else []
    return described


def _drop_fastapis_own(responses: dict[str, Mapping[str, Any]]) -> None:
    """Remove the 422 of FastAPI's own validation, which no endpoint here uses."""
    content = responses.get("422", {}).get("content", {})
    if "HTTPValidationError" in str(content):
        del responses["422"]
