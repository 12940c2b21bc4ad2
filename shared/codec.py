"""Encodes dataclasses as msgpack maps, and decodes them.

Every message is a map ``{"t": type name, "v": version, field: value, ...}``. Arrays are packed,
little-endian, in msgpack binary. Any bytes that are not a valid message raise a DecodeError.
A missing field gets its default, if it has one, and an unknown field is ignored. So services of
neighbouring versions work together while they are replaced one by one.
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from shared.errors import DecodeError

IntArray = Annotated[npt.NDArray[np.int32], "<i4"]
"""Token ids, block ids and handles: packed little-endian int32 on the wire."""

FloatArray = Annotated[npt.NDArray[np.float32], "<f4"]
"""Log-probabilities: packed little-endian float32 on the wire."""

_Convert = Callable[[Any], Any]


class Message:
    """Base of all messages; equality is equality of the encoded bytes."""

    __slots__ = ()
    version: ClassVar[int] = 1

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and encode(self) == encode(other)

    def __hash__(self) -> int:
        return hash(encode(self))


_M = TypeVar("_M", bound=type[Message])


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    encode: _Convert
    decode: _Convert
    is_required: bool  # it has no default


class _Schema:
    """The fields of one dataclass, with their converters."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        hints = typing.get_type_hints(cls, include_extras=True)
        self.fields = tuple(
            _Field(field.name, *_converters(hints[field.name]), is_required=_has_no_default(field))
            for field in dataclasses.fields(cls)
        )

    def to_map(self, value: Any) -> dict[str, Any]:
        return {field.name: field.encode(getattr(value, field.name)) for field in self.fields}

    def from_map(self, data: Any) -> Any:
        if not isinstance(data, dict):
            raise DecodeError(f"{self.cls.__name__}: expected a map, got {type(data).__name__}")
        values = {}
        for field in self.fields:
            if field.name not in data:
                if field.is_required:
                    raise DecodeError(f"{self.cls.__name__}: field {field.name!r} is missing")
                continue
            try:
                values[field.name] = field.decode(data[field.name])
            except DecodeError as error:
                raise DecodeError(f"{self.cls.__name__}.{field.name}: {error}") from None
        return self.cls(**values)


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


_schemas: dict[type, _Schema] = {}
_registry: dict[str, type[Message]] = {}


def message(cls: _M) -> _M:
    """Class decorator: registers a dataclass as a message under its name."""
    _registry[cls.__name__] = cls
    _schemas[cls] = _Schema(cls)
    return cls


def encode(value: Message) -> bytes:
    """One message as a msgpack map with type tag and version."""
    data = {"t": type(value).__name__, "v": value.version}
    data.update(_schemas[type(value)].to_map(value))
    packed: bytes = msgpack.packb(data)
    return packed


def decode(data: bytes) -> Message:
    """The message in bytes from ``encode``.

    Raises:
        DecodeError: other bytes, also of unknown types and versions.
    """
    try:
        value = msgpack.unpackb(data)
    except Exception as error:  # msgpack raises many unrelated types on invalid bytes
        raise DecodeError(f"not msgpack: {type(error).__name__}: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise DecodeError(f"expected a map, got {type(value).__name__}")
    try:
        return _decode_map(value)
    except DecodeError as error:
        raise DecodeError(str(error), _request_id(value)) from None


def decode_as(cls: type[typing.Any], data: bytes) -> Any:
    """Like ``decode``, where only one type of message is valid."""
    value = decode(data)
    if not isinstance(value, cls):
        raise DecodeError(f"expected {cls.__name__}, got {type(value).__name__}")
    return value


def field_of(data: bytes, name: str) -> Any:
    """One field of a message whose other fields may be those of another version.

    Returns:
        The value as msgpack decodes it; None if there is none.
    """
    try:
        value = msgpack.unpackb(data)
    except Exception:  # msgpack raises many unrelated types on invalid bytes
        return None
    return value.get(name) if isinstance(value, dict) else None


def _decode_map(data: dict[Any, Any]) -> Message:
    tag = data.get("t")
    cls = _registry.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise DecodeError(f"unknown message type {tag!r:.80}")
    if data.get("v") != cls.version:
        raise DecodeError(f"{tag}: version {data.get('v')!r:.80}, expected {cls.version}")
    decoded: Message = _schemas[cls].from_map(data)
    return decoded


def _request_id(data: dict[Any, Any]) -> str | None:
    found = data.get("request_id")
    return found if isinstance(found, str) else None


def _converters(hint: Any) -> tuple[_Convert, _Convert]:
    """Encoder and decoder of a field of this type."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        wire: Any = hint.__metadata__[0]
        if isinstance(wire, str):
            return _array_converters(np.dtype(wire))
        if not hasattr(wire, "decode"):  # an annotation for other readers
            return _converters(hint.__origin__)
        converters: tuple[_Convert, _Convert] = (wire.encode, wire.decode)  # the type has its own
        return converters
    if origin in (typing.Union, types.UnionType):
        return _optional_converters(hint)
    if origin is tuple:
        return _tuple_converters(typing.get_args(hint)[0])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        schema = _schemas.setdefault(hint, _Schema(hint))
        return schema.to_map, schema.from_map
    if hint in (int, float, str, bool, bytes):
        return _identity, _scalar_decoder(hint)
    raise TypeError(f"no wire format for {hint}")


def _identity(value: Any) -> Any:
    return value


def _scalar_decoder(kind: type) -> _Convert:
    accepted = (int, float) if kind is float else (kind,)

    def decode_scalar(value: Any) -> Any:
        # bool is a subclass of int, but True is not a count or a token
        if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
            raise DecodeError(f"expected {kind.__name__}, got {value!r:.80}")
        return kind(value)

    return decode_scalar


def _array_converters(dtype: np.dtype[Any]) -> tuple[_Convert, _Convert]:
    def encode_array(value: Any) -> bytes:
        return np.ascontiguousarray(value, dtype=dtype).tobytes()

    empty = np.frombuffer(b"", dtype=dtype)  # most arrays of a plan; read-only as all of them

    def decode_array(value: Any) -> Any:
        if value == b"":
            return empty
        if not isinstance(value, bytes) or len(value) % dtype.itemsize:
            raise DecodeError(f"expected packed {dtype}, got {value!r:.80}")
        return np.frombuffer(value, dtype=dtype)

    return encode_array, decode_array


def _optional_converters(hint: Any) -> tuple[_Convert, _Convert]:
    inner = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
    if len(inner) != 1:
        raise TypeError(f"no wire format for {hint}")
    write, read = _converters(inner[0])
    return (
        lambda value: None if value is None else write(value),
        lambda value: None if value is None else read(value),
    )


def _tuple_converters(item: Any) -> tuple[_Convert, _Convert]:
    write, read = _converters(item)

    def decode_tuple(value: Any) -> Any:
        if not isinstance(value, list):
            raise DecodeError(f"expected a list, got {value!r:.80}")
        return tuple(read(element) for element in value)

    return lambda value: [write(element) for element in value], decode_tuple
