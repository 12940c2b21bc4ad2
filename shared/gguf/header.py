"""Reads the header of a GGUF file: its metadata, and where its tensors are.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the ``gguf``
package makes arrays for each string of a vocabulary, which takes seconds at every start of a
service; this one reads the same in a fraction, and needs no torch.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ModelUnsupported

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MOST_DIMENSIONS = 8
_LENGTH = struct.Struct("<Q")
_TENSOR_END = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's entry in the header.

    Attributes:
        name: as llama.cpp gives it.
        shape: outermost dimension first, in elements.
        type_id: of the elements or blocks, by ggml's numbering.
        offset: of its data, in bytes from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        path: of the file.
        metadata: by key: numbers, texts, lists of texts, and arrays of numbers.
        tensors: by name.
        num_bytes: of the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    num_bytes: int

    @property
    def architecture(self) -> str:
        """Name of the model family."""
        return str(self.metadata["general.architecture"])

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value whose key begins with the name of the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: Path) -> GgufHeader:
    """Read a file's header.

    Raises:
        ModelUnsupported: it is no GGUF file, of another version, damaged, or one part of several.
    """
    num_bytes = path.stat().st_size
    if num_bytes < len(_MAGIC):
        raise ModelUnsupported(f"{path}: this is no GGUF file, it has {num_bytes} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            metadata, tensors = _Reader(data).read()
        except (IndexError, struct.error, OverflowError, UnicodeDecodeError) as error:
            reason = "its header is damaged or incomplete; copy or download it again"
            raise ModelUnsupported(f"{path}: {reason}") from error
        except _WrongFile as error:
            raise ModelUnsupported(f"{path}: {error}") from None
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise ModelUnsupported(
            f"{path}: split.count={parts}: it is one part of a model; join the parts with "
            "llama-gguf-split --merge"
        )
    if "general.architecture" not in metadata:
        raise ModelUnsupported(f"{path}: its metadata has no general.architecture")
    return GgufHeader(path, metadata, tensors, num_bytes)


class _WrongFile(Exception):
    """Something else than the format allows."""


class _Reader:
    """Reads the parts of a header one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """The metadata, and the tensors by name."""
        if self._data[:4] != _MAGIC:
            raise _WrongFile("this is no GGUF file, it does not begin with GGUF")
        self._at = 4
        version = self._number(4)
        if version not in _VERSIONS:
            raise _WrongFile(f"version {version} of GGUF is not served; expected 2 or 3")
        num_tensors, num_values = self._number(10), self._number(10)
        metadata = {}
        for _ in range(num_values):
            key = self._text()
            metadata[key] = self._value(self._number(4))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _WrongFile(f"general.alignment={alignment!r}: expected a positive number")
        entries = [self._tensor() for _ in range(num_tensors)]
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise _WrongFile(f"it has two tensors {name}")
            tensors[name] = GgufTensor(name, shape, type_id, begin + offset)
        return metadata, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset from the beginning of all data."""
        name = self._text()
        num_dimensions = self._number(4)
        if num_dimensions > _MOST_DIMENSIONS:
            raise _WrongFile(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(int(each) for each in reversed(self._numbers(10, num_dimensions)))
        if not shape or not all(shape):
            raise _WrongFile(f"tensor {name} has the shape {list(shape)}")
        type_id, offset = self._unpacked(_TENSOR_END)
        return name, shape, type_id, offset

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(kind)
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise _WrongFile(f"its metadata has values of the unknown type {kind}")
        kind, count = self._number(4), self._number(10)
        if kind in _NUMBERS:
            return self._numbers(kind, count)
        if kind != _STRING:
            raise _WrongFile(f"its metadata has arrays of the type {kind}")
        return self._texts(count)

    def _number(self, kind: int) -> Any:
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        """An array [count] that does not refer to the file."""
        end = self._at + _NUMBERS[kind].itemsize * count
        if end > len(self._data):
            raise IndexError
        part = self._data[self._at : end]
        self._at = end
        return np.frombuffer(part, _NUMBERS[kind])

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        """Texts that stand one after the other; fast, because vocabularies have 100,000s."""
        data, at, unpack = self._data, self._at, _LENGTH.unpack_from
        size = len(data)
        found = []
        for _ in range(count):
            begin = at + 8
            at = begin + unpack(data, at)[0]
            if at > size:
                raise IndexError
            found.append(data[begin:at].decode())
        self._at = at
        return found

    def _unpacked(self, form: struct.Struct) -> tuple[int, ...]:
        found = form.unpack_from(self._data, self._at)
        self._at += form.size
        return found
