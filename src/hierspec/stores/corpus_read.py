"""Text out of files for a corpus: .txt, .jsonl (both also .gz) and .parquet, as a stream of pieces."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.progress import Progress

# Where text stands in records: what lies under these keys is followed through lists and objects, the rest is not read.
KEYS = (
    "text", "content", "value", "prompt", "question", "instruction", "input", "context", "completion", "answer",
    "response", "output", "solution", "canonical_solution", "messages", "conversations", "conversation", "turns",
    "data",
)  # fmt: skip
_KINDS = (".txt", ".jsonl", ".parquet")
_PIECE = 1 << 14  # characters; a longer text is cut, so that a batch keeps all cores busy
_BATCH = 1 << 20  # characters encoded at a time
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Input:
    """A file, as it was when the build began."""

    path: Path
    kind: str
    bytes: int
    modified: int  # nanoseconds
    sha256: str


@dataclass(frozen=True)
class Piece:
    """A text, or as much of one as is encoded at once."""

    text: str
    file: int
    number: int  # pieces of the file before it
    bytes_done: int  # of all files


def identify(paths: Sequence[Path], progress: Progress) -> list[Input]:
    """Reads all files once, so that a build that goes on later can tell whether they are still the same."""
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


def batches(inputs: Sequence[Input], file: int, piece: int) -> Iterator[list[Piece]]:
    """All pieces from the given place on, as many at a time as are worth encoding together."""
    batch: list[Piece] = []
    size = 0
    for found in _pieces(inputs, file, piece):
        batch.append(found)
        size += len(found.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(inputs: Sequence[Input], file: int, piece: int) -> Iterator[Piece]:
    for number in range(file, len(inputs)):
        this, before = inputs[number], sum(earlier.bytes for earlier in inputs[:number])
        for place, (text, done) in enumerate(_texts(this)):
            if done > this.bytes:
                break  # it grows, perhaps as fast as it is read
            if number > file or place >= piece:
                yield Piece(text, number, place, before + done)
        state = this.path.stat()
        if (state.st_size, state.st_mtime_ns) != (this.bytes, this.modified):
            raise HierspecError(f"{this.path} was changed during the build: remove the corpus and build it again.")


def _kind(path: Path) -> str:
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in _KINDS or path.name.endswith(".parquet.gz"):
        raise HierspecError(f"{path} is of no kind that can be read: give .txt, .jsonl (also .gz) or .parquet files.")
    if not path.is_file():
        raise HierspecError(f"There is no file {path}: check its name.")
    return kind


def _texts(this: Input) -> Iterator[tuple[str, int]]:
    """The pieces of a file, each with how many bytes of the file have been read by then."""
    try:
        if this.kind == ".parquet":
            yield from _parquet_texts(this)
            return
        with ExitStack() as stack:
            raw = stack.enter_context(this.path.open("rb"))
            packed = this.path.suffix == ".gz"
            unpacked: Any = stack.enter_context(gzip.GzipFile(fileobj=raw)) if packed else raw
            lines = stack.enter_context(io.TextIOWrapper(unpacked, encoding="utf-8-sig"))
            whole = this.kind == ".txt"
            for text in _cut(iter(lambda: lines.read(_PIECE), "")) if whole else _record_texts(this.path, lines):
                yield text, raw.tell()
    except UnicodeDecodeError as error:
        raise HierspecError(f"{this.path} is not UTF-8 text ({error.reason}): convert it first.") from error
    except (EOFError, zlib.error, OSError) as error:
        raise HierspecError(f"{this.path} cannot be read ({error}): check the file and build again.") from error


def _record_texts(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise HierspecError(f"Line {number} of {path} is not JSON ({error}): repair or remove it.") from error
        for text in _strings(record):
            yield from _cut([text])


def _parquet_texts(this: Input) -> Iterator[tuple[str, int]]:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise HierspecError("Reading Parquet files needs pyarrow; install it with: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(this.path) as file:
            columns = [name for name in file.schema_arrow.names if name in KEYS]
            rows, done = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(batch_size=256, columns=columns) if columns else ():
                done += batch.num_rows
                for record in batch.to_pylist():
                    for text in _strings(record):
                        for piece in _cut([text]):
                            yield piece, this.bytes * done // rows
    except arrow.ArrowException as error:
        raise HierspecError(f"{this.path} cannot be read as Parquet ({error}): fetch it again.") from error


def _strings(record: Any) -> Iterator[str]:
    """Every string that stands under one of `KEYS`, or in a list there."""
    if isinstance(record, str):
        # JSON can spell halves of characters, which no tokenizer takes.
        yield record if record.isascii() else record.encode("utf-8", "replace").decode("utf-8")
    elif isinstance(record, list):
        for item in record:
            yield from _strings(item)
    elif isinstance(record, dict):
        for key, value in record.items():
            if key in KEYS:
                yield from _strings(value)


def _cut(chunks: Iterable[str]) -> Iterator[str]:
    """One text in pieces of at most `_PIECE` characters, cut after a blank line, else a line, else a space."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        start = 0
        while len(rest) - start > _PIECE:
            middle, last = start + _PIECE // 2, start + _PIECE
            found = (rest.rfind(mark, middle, last) + len(mark) for mark in ("\n\n", "\n", " "))
            end = next((end for end in found if end > middle), last)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest.strip():
        yield rest
