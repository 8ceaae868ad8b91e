"""Reads text from .txt, .jsonl (both also .gz) and .parquet files as a stream of pieces."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown_path, why
from hierspec.progress import Progress

# Keys of a record that hold text, directly or in lists and objects below; other keys are not read.
_TEXT_KEYS = ("text", "content", "value", "data")
_PROMPT_KEYS = ("prompt", "question", "instruction", "input", "context")
_ANSWER_KEYS = ("completion", "answer", "response", "output", "solution", "canonical_solution")
_CHAT_KEYS = ("messages", "conversations", "conversation", "turns")
KEYS = _TEXT_KEYS + _PROMPT_KEYS + _ANSWER_KEYS + _CHAT_KEYS

_KINDS = (".txt", ".jsonl", ".parquet")
_PIECE = 1 << 14  # characters; longer texts are split, so that a batch keeps all cores busy
_BATCH = 1 << 20  # characters encoded at a time
_BLOCK = 1 << 22  # bytes read at a time


@dataclass(frozen=True)
class Input:
    """A file, as it was when the build started."""

    path: Path
    kind: str
    bytes: int
    modified: int  # nanoseconds
    sha256: str


@dataclass(frozen=True)
class Piece:
    """A text, or the part of one that is encoded at once."""

    text: str
    file: int
    number: int  # in the file
    bytes_done: int  # of all files


def identify(paths: Sequence[Path], progress: Progress) -> list[Input]:
    """Hashes all files, so that a resumed build can tell whether they have changed."""
    kinds = [_kind(path) for path in paths]
    total, done = sum(path.stat().st_size for path in paths), 0
    inputs = []
    for path, kind in zip(paths, kinds, strict=True):
        state, digest = path.stat(), hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                progress("Checking the files", done, total)
        inputs.append(Input(path, kind, state.st_size, state.st_mtime_ns, digest.hexdigest()))
    return inputs


def batches(inputs: Sequence[Input], first_file: int, first_piece: int) -> Iterator[list[Piece]]:
    """All pieces from the given one on, in batches of about a million characters."""
    batch: list[Piece] = []
    size = 0
    for piece in _pieces(inputs, first_file, first_piece):
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(inputs: Sequence[Input], first_file: int, first_piece: int) -> Iterator[Piece]:
    for file in range(first_file, len(inputs)):
        source, bytes_before = inputs[file], sum(earlier.bytes for earlier in inputs[:file])
        for number, (text, bytes_read) in enumerate(_texts(source)):
            if bytes_read > source.bytes:
                break  # the file is growing, perhaps as fast as it is read
            if file > first_file or number >= first_piece:
                yield Piece(text, file, number, bytes_before + bytes_read)
        state = source.path.stat()
        if (state.st_size, state.st_mtime_ns) != (source.bytes, source.modified):
            raise HierspecError(f"{source.path} was changed during the build: remove the corpus and build it again.")


def _kind(path: Path) -> str:
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in _KINDS or path.name.endswith(".parquet.gz"):
        raise HierspecError(
            f"{shown_path(path)} is not a supported file type: give .txt, .jsonl (also .gz) or .parquet files."
        )
    if not os.path.isfile(path):  # which is not an error for any name
        raise HierspecError(f"There is no file {shown_path(path)}: check its name.")
    return kind


def _texts(source: Input) -> Iterator[tuple[str, int]]:
    """The pieces of a file, each with the number of bytes of the file read so far."""
    try:
        if source.kind == ".parquet":
            yield from _parquet_texts(source)
            return
        with ExitStack() as stack:
            raw = stack.enter_context(source.path.open("rb"))
            gzipped = source.path.suffix == ".gz"
            binary: Any = stack.enter_context(gzip.GzipFile(fileobj=raw)) if gzipped else raw
            lines = stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8-sig"))
            if source.kind == ".txt":
                texts = _split(iter(lambda: lines.read(_PIECE), ""))
            else:
                texts = _record_texts(source.path, lines)
            for text in texts:
                yield text, raw.tell()
    except UnicodeDecodeError as error:
        raise HierspecError(f"{source.path} is not UTF-8 text: convert it first.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise HierspecError(f"{source.path} cannot be read as gzip: fetch or compress it again.") from error
    except OSError as error:
        raise HierspecError(f"{source.path} cannot be read: {why(error)}; check it and build again.") from error


def _record_texts(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise HierspecError(f"Line {number} of {path} is not JSON: repair or remove it.") from error
        for text in _strings(record):
            yield from _split([text])


def _parquet_texts(source: Input) -> Iterator[tuple[str, int]]:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise HierspecError("Reading Parquet files needs pyarrow; install it with: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(source.path) as file:
            columns = [name for name in file.schema_arrow.names if name in KEYS]
            rows, rows_read = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(batch_size=256, columns=columns) if columns else ():
                rows_read += batch.num_rows
                for record in batch.to_pylist():
                    for text in _strings(record):
                        for piece in _split([text]):
                            yield piece, source.bytes * rows_read // rows
    except arrow.ArrowException as error:
        raise HierspecError(f"{source.path} cannot be read as Parquet: fetch it again.") from error


def _strings(record: Any) -> Iterator[str]:
    """Every string under one of `KEYS`, or in a list there."""
    if isinstance(record, str):
        # JSON can hold lone surrogates, which tokenizers refuse.
        yield record if record.isascii() else record.encode("utf-8", "replace").decode("utf-8")
    elif isinstance(record, list):
        for item in record:
            yield from _strings(item)
    elif isinstance(record, dict):
        for key, value in record.items():
            if key in KEYS:
                yield from _strings(value)


def _split(chunks: Iterable[str]) -> Iterator[str]:
    """Splits one text into pieces of at most `_PIECE` characters, after a blank line, else a line, else a space."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        start = 0
        while len(rest) - start > _PIECE:
            middle, last = start + _PIECE // 2, start + _PIECE
            ends = (rest.rfind(mark, middle, last) + len(mark) for mark in ("\n\n", "\n", " "))
            end = next((end for end in ends if end > middle), last)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest.strip():
        yield rest
