"""The grammar of a call whose arguments stand between tags, such as GLM's and Qwen3-Coder's.

A parameter of type string is plain text, any other one is JSON.
"""

from collections.abc import Mapping
from typing import Any

from gateway.answers.tag_calls import Tags
from gateway.grammars.lark import ANY_TEXT, json_value, literal, slashed, with_tokens, without

_LINE_END = '"\\n"?'
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"}
)
_DEFINITIONS = ("$defs", "definitions")
_READ = frozenset({"type", "properties", "required", "additionalProperties", *_DEFINITIONS})
_KEY = r"/[^<>\s]{1,64}/"


class TaggedCall:
    """One call of a tool, as an expression and the rules that it needs.

    Args:
        name: of the tool.
        schema: JSON schema of its arguments.
        tags: around them.
        token_ids: of tags that are special tokens.
        prefix: of the names of rules.

    Attributes:
        expression: of the call.
        rules: in Lark's notation.

    Raises:
        ValueError: arguments in this format cannot follow the schema.
    """

    def __init__(
        self,
        name: str,
        schema: Mapping[str, Any],
        tags: Tags,
        token_ids: Mapping[str, int],
        prefix: str,
    ) -> None:
        self.rules: list[str] = []
        self._tags = tags
        self._token_ids = token_ids
        self._prefix = prefix
        self._definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        others = set(schema) - _READ - _ANNOTATIONS
        if others:
            raise ValueError(
                f"{min(others)!r} of the parameters of {name!r} is not for arguments between tags, "
                "as this model writes them; say it with properties and required"
            )
        head = self._marker(f"{tags.name[0]}{name}{tags.name[1]}")
        self.expression = f"{head} {self._arguments(schema)} {_LINE_END}"

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        given = schema.get("properties")
        properties: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        required = [key for key in schema.get("required") or () if isinstance(key, str)]
        properties |= {key: {} for key in required if key not in properties}
        if not properties and schema.get("additionalProperties") is not False:
            return f"({self._argument(_KEY, {'type': 'string'})})*"
        arguments = [
            f"({self._argument(self._key(key), each)}){'' if key in required else '?'}"
            for key, each in properties.items()
        ]
        return " ".join(arguments)

    def _key(self, key: str) -> str:
        if not key or key != key.strip() or "<" in key or ">" in key:
            raise ValueError(f"a parameter of the name {key!r} cannot stand between tags")
        return literal(key)

    def _argument(self, key: str, schema: Any) -> str:
        tags = self._tags
        before, after = (self._marker(each) for each in tags.key)
        opening = f"{_LINE_END} {self._marker(tags.value[0])}" if tags.value[0] else ""
        line = '"\\n"' if tags.trims_lines else ""
        return f"{_LINE_END} {before} {key} {after} {opening} {line} {self._value(schema)}"

    def _value(self, schema: Any) -> str:
        """A value, and the tag behind it."""
        tags = self._tags
        line = "\n" if tags.trims_lines else ""
        closing = f"{literal(line)} {self._marker(tags.value[1])}"
        if not isinstance(schema, Mapping) or schema.get("type") != "string":
            found = schema if isinstance(schema, Mapping) else {} if schema else {"not": {}}
            return f"{self._rule(json_value({**self._definitions, **found}))} {closing}"
        texts = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(texts, list):
            return f"{self._rule(self._one_of(texts))} {closing}"
        text = self._terminal(schema)
        if tags.value[1] in self._token_ids:
            may_be_empty = not schema.get("minLength") and "pattern" not in schema
            return f"{self._rule(text)}{'?' if may_be_empty else ''} {closing}"
        return self._rule(text, f"[suffix={literal(line + tags.value[1])}]")

    def _one_of(self, texts: list[Any]) -> str:
        end = self._tags.value[1]
        found = [each for each in texts if isinstance(each, str) and each and end not in each]
        if not found:
            raise ValueError("an enumeration of texts has none that can stand between tags")
        return " | ".join(map(literal, found))

    def _terminal(self, schema: Mapping[str, Any]) -> str:
        """A terminal for the texts that a schema of strings allows; its name."""
        conditions = [ANY_TEXT, without(self._tags.value[1])]
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            conditions.append(f"/(?s:.{{{least},{most}}})/")
        if isinstance(pattern := schema.get("pattern"), str):
            conditions.append(f"/{slashed(_whole(pattern))}/")
        name = f"{self._prefix}_{len(self.rules)}".upper()
        self.rules.append(f"{name}: {' & '.join(conditions)}")
        return name

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def _marker(self, text: str) -> str:
        return with_tokens(text, self._token_ids)


def _whole(pattern: str) -> str:
    """An expression for the whole text, from one that may stand anywhere in it."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
