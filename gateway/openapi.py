"""The bodies in the OpenAPI description, which FastAPI does not read by itself here.

Bodies are read and checked by hand, so that nothing but OpenAI's error format ever goes out and no
more than the limit is ever held in memory.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


def takes(*bodies: type[BaseModel]) -> dict[str, Any]:
    """An endpoint's ``openapi_extra``: its body is one of these."""
    refs = [{"$ref": _REF.format(model=body.__name__)} for body in bodies]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, bodies: list[type[BaseModel]]) -> dict[str, Any]:
    """The OpenAPI description of ``app``, with the schemas of all bodies."""
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    components = described.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas["$defs"])
    return described
