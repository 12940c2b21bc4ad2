"""The fields that ask for structured output: OpenAI's and vLLM's."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.grammars.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from gateway.http.errors import invalid, invalid_value
from gateway.openai.requests.body import Body, Part

MAX_CHOICE_TEXTS = 10_000
MAX_NAME_CHARS = 64

_ANY_OBJECT = JsonSchema({"type": "object"})
_Text = Annotated[str, Field(min_length=1)]
_Schema = dict[str, Any]
ChoiceTexts = Annotated[
    list[_Text], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICE_TEXTS)
]


class JsonSchemaFormat(Part):
    """``json_schema`` of a ``response_format``."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    schema_: _Schema | None = Field(None, alias="schema")
    strict: bool | None = Field(
        None, description="Answers follow the schema whether it is true or false."
    )


class ResponseFormat(Part):
    """``response_format`` of a body."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Part):
    """``structured_outputs`` of a body, as vLLM has it: one of these."""

    json_: _Schema | str | None = Field(None, alias="json")
    regex: _Text | None = None
    choice: ChoiceTexts | None = None
    grammar: _Text | None = None
    json_object: Literal[True] | None = None


class StructuredFields(Body):
    """What a body may have; at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | str | None = None
    guided_regex: _Text | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: _Text | None = None


def constraint_of(body: StructuredFields) -> tuple[str, Constraint] | None:
    """What the answer has to look like, and the field that asks for it; None: anything.

    Raises:
        ApiError: 400, a field is not valid, or there are several.
    """
    found = list(_constraints(body))
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise invalid(second, f"{second}: {first} asks for structured output already; give one")
    return found[0] if found else None


def _constraints(body: StructuredFields) -> Iterator[tuple[str, Constraint]]:
    if body.response_format is not None:
        found = _of_response_format(body.response_format)
        if found is not None:
            yield found
    if body.structured_outputs is not None:
        yield _of_structured_outputs(body.structured_outputs)
    if body.guided_json is not None:
        yield "guided_json", _schema("guided_json", body.guided_json)
    if body.guided_regex is not None:
        yield "guided_regex", Regex(body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", Choices(body.guided_choice)
    if body.guided_grammar is not None:
        yield "guided_grammar", Grammar(body.guided_grammar)


def _of_response_format(given: ResponseFormat) -> tuple[str, Constraint] | None:
    path = "response_format.json_schema"
    if given.type != "json_schema":
        if given.json_schema is not None:
            raise invalid(path, f'{path}: only allowed when type is "json_schema"')
        return ("response_format", _ANY_OBJECT) if given.type == "json_object" else None
    if given.json_schema is None:
        raise invalid(path, f'{path}: required when type is "json_schema"')
    schema = given.json_schema.schema_
    return f"{path}.schema", _ANY_OBJECT if schema is None else JsonSchema(schema)


def _of_structured_outputs(given: StructuredOutputs) -> tuple[str, Constraint]:
    path = "structured_outputs"
    found: list[tuple[str, Constraint]] = []
    if given.json_ is not None:
        found.append((f"{path}.json", _schema(f"{path}.json", given.json_)))
    if given.regex is not None:
        found.append((f"{path}.regex", Regex(given.regex)))
    if given.choice is not None:
        found.append((f"{path}.choice", Choices(given.choice)))
    if given.grammar is not None:
        found.append((f"{path}.grammar", Grammar(given.grammar)))
    if given.json_object:
        found.append((f"{path}.json_object", _ANY_OBJECT))
    if len(found) != 1:
        raise invalid(path, f"{path}: give one of json, regex, choice, grammar and json_object")
    return found[0]


def _schema(path: str, given: _Schema | str) -> JsonSchema:
    """A schema as an object or as its text."""
    if isinstance(given, str):
        try:
            parsed = json.loads(given)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise invalid_value(path, given, "must be a JSON schema, or the text of one")
        given = parsed
    return JsonSchema(given)
