"""Reads files that anybody may have written: plans, prompts, configurations.

Whatever is wrong with one is reported in one sentence, and without long waiting.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from hierspec.core.errors import HierspecError

_WHY = {
    errno.ENOENT: "there is no such file",
    errno.EISDIR: "it is a folder",
    errno.ENOTDIR: "a part of its path is a file, not a folder",
    errno.EACCES: "you are not permitted to read it",
    errno.EPERM: "you are not permitted to read it",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ELOOP: "it is a link that leads to itself",
    errno.EIO: "the disk failed",
}
_LARGEST_LINE = 4 << 20  # bytes of a line of JSON, which may take twenty times as much memory once parsed
_LARGEST_TABLE = 1 << 15  # characters of TOML; ours take hundreds
_MOST_DOTS = 1000  # in TOML: the standard library's time is quadratic in the length of a dotted key

_LARGEST_OBJECT = 16 << 20  # bytes of a file that holds one JSON object; real ones have thousands
_LONGEST_SHOWN = 80
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _LONGEST_SHOWN

Refuse = Callable[[str], HierspecError]  # from the reason to a sentence that says what to do


def refusal(path: str | Path, remedy: str) -> Refuse:
    """Errors for a file whose purpose the user need not know: why it cannot be read, and what to do."""
    return lambda reason: HierspecError(f"{shown_path(path)} cannot be read: {reason}; {remedy}.")


def read_text(path: str | Path, refuse: Refuse, largest: int = 64 << 20) -> str:
    """The text of a UTF-8 file, with or without a byte order mark, of at most `largest` bytes."""
    with _opened(path, refuse) as file:
        content = _read(file, largest + 1, refuse)
    if len(content) > largest:
        raise refuse(f"it is larger than {largest >> 20} MB" if largest >> 20 else f"it is larger than {largest} bytes")
    return _decoded(content, refuse)


def read_object(path: str | Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file. Lone surrogates are refused: nothing could print or encode them."""
    refuse = refusal(path, remedy)
    content = _parsed(read_text(path, refuse, _LARGEST_OBJECT), refuse)
    if not isinstance(content, dict):
        raise refuse("it holds no JSON object")
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refuse("it holds halves of characters (surrogates)") from error
    return content


def json_lines(
    path: str | Path, refuse: Refuse, refuse_line: Callable[[int, str], HierspecError]
) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1 on, and the parsed JSON of each line that is not blank.

    Lines end with a line feed. Other line breaks, such as U+2028, may occur inside a string.
    """
    with _opened(path, refuse) as file:
        number = 0
        while line := _read_line(file, refuse):
            number += 1
            refuse_this = partial(refuse_line, number)
            if len(line) > _LARGEST_LINE:
                raise refuse_this(f"it is longer than {_LARGEST_LINE >> 20} MB")
            text = _decoded(line, refuse_this)
            if text.strip():
                yield number, _parsed(text, refuse_this)


def toml_table(text: str, refuse: Refuse) -> dict[str, Any]:
    """The tables of a short file of TOML."""
    if len(text) > _LARGEST_TABLE or text.count(".") > _MOST_DOTS:
        raise refuse(f"it is longer than {_LARGEST_TABLE:,} characters, or has too many dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise refuse(" ".join(str(error)[:200].split())) from error
    except ValueError as error:
        raise refuse("a number in it has too many digits") from error
    except RecursionError as error:
        raise refuse("its lists or tables are nested too deeply") from error


def shown(value: object) -> str:
    """A value's `repr` for an error message: on one line, printable, and short."""
    try:
        text = _SHORT.repr(value)
    except RecursionError:
        return "something nested too deeply"
    except ValueError:
        return "a number of many digits"
    return text if len(text) <= 2 * _LONGEST_SHOWN else f"{text[: 2 * _LONGEST_SHOWN]}…"


def shown_path(path: str | Path) -> str:
    text = str(path).encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\0")
    return text if len(text) <= 200 else f"{text[:100]}…{text[-80:]}"


def why(error: OSError | ValueError) -> str:
    """Why a file could not be opened, in plain words."""
    if isinstance(error, OSError):
        return _WHY.get(error.errno or 0, "the system cannot read it")
    return "its name is not one that a file can have"  # a zero byte, or characters that cannot be encoded


@contextmanager
def _opened(path: str | Path, refuse: Refuse) -> Iterator[BinaryIO]:
    """The open file. A pipe that nobody writes to counts as empty: we do not wait for a writer."""
    patient = getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, os.O_RDONLY | patient)
    except (OSError, ValueError) as error:
        raise refuse(why(error)) from error
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refuse(_WHY[errno.EISDIR])
    if patient:  # from here on we wait: whoever writes to a pipe may take time
        os.set_blocking(descriptor, True)
    with open(descriptor, "rb") as file:
        yield file


def _read(file: BinaryIO, size: int, refuse: Refuse) -> bytes:
    try:
        return file.read(size)
    except OSError as error:
        raise refuse(why(error)) from error


def _read_line(file: BinaryIO, refuse: Refuse) -> bytes:
    try:
        return file.readline(_LARGEST_LINE + 1)
    except OSError as error:
        raise refuse(why(error)) from error


def _decoded(content: bytes, refuse: Refuse) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse("it is not UTF-8 text") from error


def _parsed(text: str, refuse: Refuse) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise refuse(f"it is not JSON from column {error.colno} on") from error
    except ValueError as error:
        raise refuse("a number in it has too many digits") from error
    except RecursionError as error:
        raise refuse("its lists or objects are nested too deeply") from error
