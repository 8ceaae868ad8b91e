"""Guards around the `tokenizers` library, which trusts its files: panics, slow patterns and unbounded growth.

A tokenizer.json comes with a model from anywhere. The library raises bare exceptions and panics, runs a regular
expression for as long as it takes, and lets a normaliser multiply a text without limit.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import refusal, why

_T = TypeVar("_T")
_MOST_BYTES = 1 << 28  # of a tokenizer.json; the largest real ones have 40 MB
# The word itself, or escapes that could hide it: nobody writes ASCII letters as escapes.
_MAY_BE_PRECOMPILED = re.compile(rb'"Precompiled"|\\u00[2-7]')
_DAMAGED = "The model's tokenizer is damaged or not supported"
_MOST_GROWTH = 64.0  # of a text by all steps of a normaliser; real ones replace a space by "▁"
_MOST_PIECES = 64  # pieces that a post-processor may put around a text
# Limits of wall-clock and CPU time, both: a busy machine changes nothing. A million characters take about a second.
_SECONDS, _SECONDS_A_CHARACTER = 2.0, 1e-5
_LOOKED_AFTER = 0.05  # seconds between checks


@contextmanager
def library_errors(sentence: str) -> Iterator[None]:
    """Turns whatever the library raises into one sentence. Its panics are not subclasses of Exception."""
    try:
        yield
    except (HierspecError, OSError, MemoryError):
        raise
    except Exception as error:
        raise HierspecError(sentence) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Ctrl-C and the like
            raise
        raise HierspecError(sentence) from error


def read_tokenizer(path: Path, remedy: str) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json."""
    sentence = f"{path} is damaged, or not a tokenizer that hierspec can read: {remedy}."
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise HierspecError(f"{path} is far too large for a tokenizer: {remedy}.")
        content = path.read_bytes()
    except OSError as error:
        raise refusal(path, remedy)(why(error)) from error
    with library_errors(sentence):
        if _MAY_BE_PRECOMPILED.search(content):
            _check_precompiled(json.loads(content), sentence)
        return tokenizers.Tokenizer.from_buffer(content)


def _check_precompiled(content: Any, sentence: str) -> None:
    """Checks a table of characters: the library allocates the length that it claims before it reads the table."""
    waiting = [content]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.values()
            if item.get("type") == "Precompiled":
                table = base64.b64decode(item["precompiled_charsmap"], validate=True)
                if len(table) < 4 or int.from_bytes(table[:4], "little") > len(table) - 4:
                    raise HierspecError(sentence)
        elif isinstance(item, list):
            waiting += item


def check_parts(backend: tokenizers.Tokenizer) -> None:
    """Rejects a tokenizer whose normaliser or post-processor could multiply a text without bound."""
    with library_errors(f"{_DAMAGED}: its parts cannot be read."):
        normaliser, processor = part(backend.normalizer), part(backend.post_processor)
        if _growth(normaliser) > _MOST_GROWTH:
            raise HierspecError(f"{_DAMAGED}: its normaliser makes texts more than {_MOST_GROWTH:.0f} times as long.")
        if _pieces(processor) > _MOST_PIECES:
            raise HierspecError(f"{_DAMAGED}: its post-processor has more than {_MOST_PIECES} pieces.")


def part(component: Any) -> dict[str, Any] | None:
    """A component as in tokenizer.json."""
    # Only this component: serialising a whole tokenizer of 150,000 tokens takes a noticeable part of a second.
    state: dict[str, Any] | None = json.loads(component.__getstate__()) if component else None
    return state


def has_patterns(backend: tokenizers.Tokenizer) -> bool:
    """Whether it contains regular expressions, which a text could keep busy for ever."""
    parts = (part(backend.normalizer), part(backend.pre_tokenizer))
    return any('"Regex"' in json.dumps(state) for state in parts)


def with_patience(task: Callable[[], _T], characters: int) -> _T:
    """The result of `task`, or one sentence if it takes far longer than a text of this length should.

    A thread cannot be stopped from outside, but it can be abandoned: it ends with the process.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((task(), None))
        except BaseException as error:  # even a panic: it is raised again in the waiting thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="tokenizer")
    thread.start()
    limit, started, used = _SECONDS + _SECONDS_A_CHARACTER * characters, time.monotonic(), time.process_time()
    while thread.is_alive() and min(time.monotonic() - started, time.process_time() - used) < limit:
        thread.join(_LOOKED_AFTER)
    if not outcome:
        raise HierspecError(f"{_DAMAGED}: its patterns take too long on this text; choose another model.")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _growth(normaliser: dict[str, Any] | None) -> float:
    """The factor by which a text can grow, at most."""
    match normaliser:
        case {"type": "Sequence", "normalizers": [*steps]}:
            growth = 1.0
            for step in steps:
                growth *= _growth(step)
            return growth
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(old)}}:
            if not old:
                raise HierspecError(f"{_DAMAGED}: its normaliser replaces an empty text.")
            return max(1.0, len(content) / len(old))
        case {"type": "Replace", "content": str(content)}:  # a pattern, which may match a single character
            return max(1.0, float(len(content)))
        case {"type": "Prepend", "prepend": str(start)}:
            return 1.0 + len(start)
        case None:
            return 1.0
    return 4.0 if normaliser and normaliser.get("type") in ("NFD", "NFKD", "NFKC", "ByteLevel") else 1.0


def _pieces(processor: dict[str, Any] | None) -> int:
    match processor:
        case {"type": "Sequence", "processors": [*steps]}:
            return sum(_pieces(step) for step in steps) + len(steps)
        case {"type": "TemplateProcessing", "single": [*single]}:
            return len(single)
    return 0
