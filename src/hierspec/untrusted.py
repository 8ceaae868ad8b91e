"""Files and values that anybody may have written: whole and of the right form, or one sentence."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError

_MOST_TEXT = 1 << 24  # bytes of a file that is read as text; real ones have thousands
_LONGEST_SHOWN = 80


def read_text(path: Path, remedy: str) -> str:
    """A text file; `remedy` tells the user what to do where it cannot be read."""
    try:
        if not path.is_file():
            raise HierspecError(f"{path} is not a file: {remedy}.")
        size = path.stat().st_size
        if size > _MOST_TEXT:
            raise HierspecError(f"{path} is far too large ({size:,} bytes): {remedy}.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error, remedy) from error
    except UnicodeDecodeError as error:
        raise HierspecError(f"{path} is damaged, it is not text in UTF-8: {remedy}.") from error


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file. None of its texts holds half a character, which nothing could print or encode."""
    text = read_text(path, remedy)
    try:
        content = json.loads(text)
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise HierspecError(f"{path} is damaged, it holds halves of characters (surrogates): {remedy}.") from error
    except ValueError as error:
        raise HierspecError(f"{path} is damaged, it is not JSON: {remedy}.") from error
    except RecursionError as error:
        raise HierspecError(f"{path} is damaged, it is nested too deeply: {remedy}.") from error
    if not isinstance(content, dict):
        raise HierspecError(f"{path} is damaged, it holds no JSON object: {remedy}.")
    return content


def unreadable(path: Path, error: OSError, remedy: str) -> HierspecError:
    reason = f": {error.strerror.lower()}" if error.strerror else ""
    return HierspecError(f"{path} cannot be read{reason}; {remedy}.")


def shown(value: object) -> str:
    """A value from a file as an error message shows it: on one line, printable, and short."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _LONGEST_SHOWN
    text = short.repr(value)
    return text if len(text) <= 2 * _LONGEST_SHOWN else f"{text[: 2 * _LONGEST_SHOWN]}..."
