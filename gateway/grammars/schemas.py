"""What llguidance does not find wrong with a JSON schema: that no value of it ever ends."""

from collections.abc import Mapping
from typing import Any

_MOST_LOOKS = 20_000  # of one schema; many nested references could need more than any


def check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that only values of infinite depth satisfy.

    Raises:
        ValueError: it is one, or too entangled to tell.
    """
    if not _Ends(schema).of(schema):
        raise ValueError("it recurses without end: no finite value satisfies it")


class _Ends:
    """Whether schemas have finite values, by what they require; other keywords are not looked at.

    A reference that is met again inside itself does not end on that way. What does not depend on
    such a reference is found once.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._inside: set[str] = set()  # references
        self._ending: set[str] = set()
        self._num_looks = 0

    def of(self, schema: Any) -> bool:
        self._num_looks += 1
        if self._num_looks > _MOST_LOOKS:
            raise ValueError("its references are too entangled")
        if not isinstance(schema, Mapping):
            return schema is not False
        return (
            self._reference(schema.get("$ref"))
            and all(self.of(each) for each in _schemas(schema.get("allOf")))
            and all(
                any(self.of(each) for each in some)
                for key in ("anyOf", "oneOf")
                if (some := _schemas(schema.get(key)))
            )
            and self._properties(schema)
            and self._items(schema)
        )

    def _reference(self, name: Any) -> bool:
        if not isinstance(name, str) or name in self._ending:
            return True
        if name in self._inside:
            return False
        self._inside.add(name)
        ends = self.of(self._target(name))
        self._inside.discard(name)
        if ends:
            self._ending.add(name)
        return ends

    def _target(self, name: str) -> Any:
        """The schema that is referred to; True if it is elsewhere or nowhere."""
        found: Any = self._root
        if not name.startswith("#"):
            return True
        for part in name[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                return True
            found = found[key]
        return found

    def _properties(self, schema: Mapping[str, Any]) -> bool:
        required, properties = schema.get("required"), schema.get("properties")
        if _may_be_other(schema, "object") or not isinstance(required, list):
            return True
        known = properties if isinstance(properties, Mapping) else {}
        return all(
            self.of(known[name]) for name in required if isinstance(name, str) and name in known
        )

    def _items(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems")
        if _may_be_other(schema, "array") or not isinstance(least, int) or least < 1:
            return True
        first = _schemas(schema.get("prefixItems"))
        rest = len(first) >= least or self.of(schema.get("items", True))
        return rest and all(self.of(each) for each in first[:least])


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _may_be_other(schema: Mapping[str, Any], kind: str) -> bool:
    """Whether values may have another type than this one."""
    given = schema.get("type")
    return given != kind and given != [kind]
