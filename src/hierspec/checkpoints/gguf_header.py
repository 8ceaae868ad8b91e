"""Reads the header of a GGUF file without trusting any of its numbers.

The gguf package's reader takes seconds for a large vocabulary and trusts every count in the file. This reader checks
each count and length against the size of the file first, so a damaged file costs milliseconds and one sentence.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.checkpoints.values import listed
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown

MAGIC = b"GGUF"
_MOST_ENTRIES = 1 << 16  # key/value pairs, or tensors: real files have hundreds
_MOST_ITEMS = 1 << 24  # of one array: the largest vocabularies have 2**18 tokens
_MOST_TEXT = 1 << 26  # bytes of one string
_LONGEST_REASON = 300
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Quantisation:
    """How one tensor type stores its numbers: blocks of `block` numbers in `size` bytes."""

    code: int
    name: str
    block: int
    size: int


QUANTISATIONS = {
    quantisation.code: quantisation
    for quantisation in (
        Quantisation(0, "F32", 1, 4),
        Quantisation(1, "F16", 1, 2),
        Quantisation(30, "BF16", 1, 2),
        Quantisation(8, "Q8_0", 32, 34),
        Quantisation(2, "Q4_0", 32, 18),
        Quantisation(3, "Q4_1", 32, 20),
        Quantisation(6, "Q5_0", 32, 22),
        Quantisation(7, "Q5_1", 32, 24),
        Quantisation(20, "IQ4_NL", 32, 18),
        Quantisation(10, "Q2_K", 256, 84),
        Quantisation(11, "Q3_K", 256, 110),
        Quantisation(12, "Q4_K", 256, 144),
        Quantisation(13, "Q5_K", 256, 176),
        Quantisation(14, "Q6_K", 256, 210),
    )
}


@dataclass(frozen=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]  # outermost first, as in torch; the file has the reverse order
    quantisation: Quantisation
    start: int  # first byte in the file
    size: int  # bytes


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]  # GGUF key -> text, number, bool or a list of them
    tensors: dict[str, StoredTensor]


def read_header(path: Path, content: np.ndarray) -> GgufHeader:
    """Reads the header of the mapped file `content` (bytes); `path` is for error messages."""
    cursor = _Cursor(path, content.data)
    if bytes(cursor.take(4, "magic")) != MAGIC:
        raise HierspecError(f"{path} is not a GGUF file.")
    version = cursor.integer("<I", "version")
    if version not in (2, 3):
        raise HierspecError(f"{path} is written in version {version} of GGUF, which is not supported: 2 and 3 are.")
    tensors, pairs = cursor.integer("<Q", "tensor count"), cursor.integer("<Q", "key count")
    if max(tensors, pairs) > _MOST_ENTRIES:
        raise cursor.damaged(f"it claims {tensors} tensors and {pairs} keys")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text("key")
        if key in metadata:
            raise cursor.damaged(f"the key {shown(key)} appears twice")
        metadata[key] = cursor.value(cursor.integer("<I", f"type of {shown(key)}"), key)
    described = [_describe(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.damaged(f"its alignment is {shown(alignment)}")
    data_start = -(-cursor.position // alignment) * alignment
    stored: dict[str, StoredTensor] = {}
    for name, shape, quantisation, offset in described:
        if name in stored:
            raise cursor.damaged(f"the tensor {shown(name)} appears twice")
        size = math.prod(shape) // quantisation.block * quantisation.size
        start = data_start + offset
        if start + size > cursor.size:
            raise cursor.damaged(f"{shown(name)} ends at byte {start + size} and the file at {cursor.size}")
        stored[name] = StoredTensor(name, shape, quantisation, start, size)
    return GgufHeader(metadata, stored)


def _describe(cursor: "_Cursor") -> tuple[str, tuple[int, ...], Quantisation, int]:
    name = cursor.text("name of a tensor")
    dimensions = cursor.integer("<I", f"dimensions of {shown(name)}")
    if not 1 <= dimensions <= 4:
        raise cursor.damaged(f"{shown(name)} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.integer("<Q", f"shape of {shown(name)}") for _ in range(dimensions)]))
    code, offset = cursor.integer("<I", f"type of {shown(name)}"), cursor.integer("<Q", f"offset of {shown(name)}")
    if code not in QUANTISATIONS:
        supported = listed(quantisation.name for quantisation in QUANTISATIONS.values())
        raise HierspecError(
            f"{cursor.path} stores {shown(name)} as {_type_name(code)}, which is not supported: hierspec reads "
            f"{supported}."
        )
    quantisation = QUANTISATIONS[code]
    if min(shape) < 1 or shape[-1] % quantisation.block:
        raise cursor.damaged(f"{shown(name)} has the shape {list(shape)}, which {quantisation.name} cannot hold")
    return name, shape, quantisation, offset


def _type_name(code: int) -> str:
    from gguf import GGMLQuantizationType  # slow to import, and only needed for this message

    try:
        return str(GGMLQuantizationType(code).name)
    except ValueError:
        return f"type {code}"


class _Cursor:
    """Reads the header from front to back; a length past the end of the file is an error, not an allocation."""

    def __init__(self, path: Path, content: memoryview) -> None:
        self.path = path
        self.content = content
        self.size = len(content)
        self.position = 0

    def damaged(self, what: str) -> HierspecError:
        readable = what if what.isprintable() and len(what) < _LONGEST_REASON else shown(what)
        return HierspecError(f"{self.path} is damaged or cut short ({readable}): fetch it again.")

    def take(self, count: int, what: str) -> memoryview:
        end = self.position + count
        if end > self.size:
            raise self.damaged(f"{what} reaches past the end")
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def integer(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form), what))[0])

    def text(self, what: str) -> str:
        length = self.integer("<Q", what)
        if length > _MOST_TEXT:
            raise self.damaged(f"{what} claims {length} bytes of text")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not text") from error

    def texts(self, count: int, what: str) -> list[str]:
        """The same as `count` calls of `text`, in a third of the time: vocabularies have hundreds of thousands of
        tokens."""
        content, position, last = self.content, self.position, self.size - _LENGTH.size
        strings_read: list[str] = []
        try:
            for _ in range(count):
                if position > last:
                    raise self.damaged(f"{what} reaches past the end")
                [length] = _LENGTH.unpack_from(content, position)
                position += _LENGTH.size
                end = position + length
                if length > _MOST_TEXT or end > self.size:
                    raise self.damaged(f"{what} claims {length} bytes of text")
                strings_read.append(str(content[position:end], "utf-8"))
                position = end
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not text") from error
        self.position = position
        return strings_read

    def value(self, code: int, key: str) -> Any:
        if code == _STRING:
            return self.text(key)
        if code == _ARRAY:
            return self.items(key)
        if code not in _SCALARS:
            raise self.damaged(f"{shown(key)} has the unknown type {code}")
        dtype = np.dtype(_SCALARS[code])
        return np.frombuffer(self.take(dtype.itemsize, key), dtype)[0].item()

    def items(self, key: str) -> list[Any]:
        code, count = self.integer("<I", key), self.integer("<Q", key)
        if count > _MOST_ITEMS:
            raise self.damaged(f"{shown(key)} claims {count} items")
        if code == _STRING:
            return self.texts(count, key)
        if code not in _SCALARS:  # the format has lists of lists, but no model that hierspec reads has any
            raise self.damaged(f"{shown(key)} is a list of the unsupported type {code}")
        dtype = np.dtype(_SCALARS[code])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize, key), dtype).tolist()
        return values
