"""Which schemas have finite values."""

from typing import Any

import pytest

from gateway.grammars.schemas import check_schema

_SELF: dict[str, Any] = {"$ref": "#"}


def array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": _SELF}},
        array(_SELF),
        array(_SELF, minItems=0),
        {"anyOf": [array(_SELF, minItems=1), {"type": "null"}]},
        {"type": ["object", "null"], "properties": {"a": _SELF}, "required": ["a"]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
        {"$ref": "#/$defs/none"},
        {"$ref": 5, "anyOf": "x", "required": [1], "properties": 3},
        {"type": "object", "required": ["other"], "properties": {}},
        {
            "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": array({"$ref": "#/$defs/b"}, minItems=1), "b": {"const": 1}},
        },
    ],
)
def test_schemas_with_finite_values_pass(schema: dict[str, Any]) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        _SELF,
        array(_SELF, minItems=1),
        {"type": "array", "prefixItems": [_SELF], "minItems": 1},
        {"allOf": [{"type": "object"}, _SELF]},
        {"oneOf": [_SELF, array(_SELF, minItems=2)]},
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": array({"$ref": "#/$defs/b"}, minItems=1),
                "b": array({"$ref": "#/$defs/a"}, minItems=1),
            },
        },
    ],
)
def test_schemas_without_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="recurses without end"):
        check_schema(schema)


def test_entangled_references_are_given_up() -> None:
    names = [f"#/$defs/{n}" for n in range(40)]
    choices = [array({"$ref": name}, minItems=1) for name in names]
    schema = {"$defs": {str(n): {"anyOf": choices} for n in range(40)}, "$ref": names[0]}
    with pytest.raises(ValueError, match="too entangled"):
        check_schema(schema)
