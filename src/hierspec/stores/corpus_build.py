"""Builds a corpus (see corpus.py) shard by shard, in bounded memory. A stopped build can be resumed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hierspec.compiled import compiled, njit
from hierspec.core.errors import HierspecError
from hierspec.paths import make_folder, whole_file
from hierspec.progress import Progress, silent
from hierspec.stores.corpus import DEPTH, MAX_SHARDS, Catalogue, Shard, Source, shard_paths
from hierspec.stores.corpus_read import KEYS, Input, Piece, batches, identify
from hierspec.stores.corpus_search import signed

Encode = Callable[[list[str]], list[list[int]]]

SHARD_TOKENS = 1 << 26  # sorting takes about 16 bytes of memory per token; a lookup searches every shard


def build_corpus(
    target: Path,
    files: Sequence[Path],
    encode: Encode,
    vocabulary: int,
    vocabulary_hash: str,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress = silent,
) -> Catalogue:
    """Builds the folder `target` from `files`. After a stop, the same call resumes behind the last finished shard.

    Files are .txt, .jsonl (both also .gz) and .parquet. A text file is one text; of a record, every string under `KEYS`
    (see corpus_read.py) is one. `encode` turns a batch of texts into token ids, without special tokens. No match and no
    draft crosses from one text to another. A text of more than 16,384 characters is split, at blank lines where it has
    some.
    """
    target = Path(target)
    if not files:
        raise HierspecError("A corpus needs at least one file: .txt, .jsonl (also .gz) or .parquet.")
    if not 1 <= shard_tokens < 1 << 31:
        raise HierspecError(f"A shard of {shard_tokens} tokens is not possible: choose between 1 and 2147483647.")
    inputs = identify([Path(file) for file in files], progress)
    sources = tuple(Source(file.path.name, file.bytes, file.sha256) for file in inputs)
    catalogue = _resume(target, Catalogue(vocabulary, vocabulary_hash, DEPTH, shard_tokens, sources))
    if catalogue.finished:
        return catalogue
    for shard in _shards(target, inputs, encode, catalogue, progress):
        catalogue = replace(catalogue, shards=(*catalogue.shards, shard))
        _write_catalogue(target, catalogue)
    if not any(shard.places for shard in catalogue.shards):
        raise HierspecError(
            f"There is no text in {', '.join(source.name for source in sources)}: "
            f"records are read under the keys {', '.join(KEYS)}."
        )
    catalogue = replace(catalogue, finished=True)
    _write_catalogue(target, catalogue)
    return catalogue


def _resume(target: Path, new: Catalogue) -> Catalogue:
    """The catalogue of an earlier, stopped call with the same arguments, else the new one."""
    make_folder(target)
    if (target / "corpus.json").exists():
        earlier = Catalogue.read(target)
        if replace(earlier, shards=(), finished=False) == new:
            return earlier
        if earlier.shards:
            raise HierspecError(
                f"{target} was started with other files, another vocabulary or other shards: "
                "remove it, or choose another name for the new corpus."
            )
    elif any(not path.name.startswith(".") for path in target.iterdir()):
        raise HierspecError(f"{target} holds other files: choose a new folder for the corpus.")
    _write_catalogue(target, new)
    return new


def _write_catalogue(target: Path, catalogue: Catalogue) -> None:
    with whole_file(target / "corpus.json") as temporary:
        temporary.write_text(catalogue.to_json(), encoding="utf-8")


def _shards(
    target: Path, inputs: Sequence[Input], encode: Encode, catalogue: Catalogue, progress: Progress
) -> Iterator[Shard]:
    """Writes the missing shards. Where a shard ends depends on the texts alone, not on where a build was stopped."""
    number = len(catalogue.shards)
    first_file, first_piece = (catalogue.shards[-1].next_file, catalogue.shards[-1].next_piece) if number else (0, 0)
    total = sum(source.bytes for source in inputs)
    separator = np.array([catalogue.separator], catalogue.token_type)
    parts, size = [separator], 1
    for batch in batches(inputs, first_file, first_piece):
        for piece, ids in zip(batch, _encode_batch(batch, encode, catalogue), strict=True):
            if len(parts) > 1 and size + len(ids) + 1 > catalogue.shard_tokens:
                yield _write_shard(target, number, np.concatenate(parts), catalogue, piece, progress)
                number, parts, size = number + 1, [separator], 1
            if len(ids):
                parts += [ids, separator]
                size += len(ids) + 1
        progress(f"Encoding {target.name}", batch[-1].bytes_done, total)
    if len(parts) > 1:
        end = Piece("", len(inputs), 0, total)
        yield _write_shard(target, number, np.concatenate(parts), catalogue, end, progress)


def _encode_batch(batch: list[Piece], encode: Encode, catalogue: Catalogue) -> Iterator[np.ndarray]:
    rows = encode([piece.text for piece in batch])
    if len(rows) != len(batch):
        raise ValueError(f"encode was given {len(batch)} texts and returned {len(rows)}")
    for row in rows:
        ids = np.array(row, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < catalogue.vocabulary:
            raise HierspecError("The tokenizer gave an id outside the vocabulary: use the tokenizer of the model.")
        yield ids.astype(catalogue.token_type)


def _write_shard(
    target: Path, number: int, tokens: np.ndarray, catalogue: Catalogue, next_piece: Piece, progress: Progress
) -> Shard:
    if number == MAX_SHARDS:
        raise HierspecError(
            f"{target} would have more than {MAX_SHARDS} shards of {catalogue.shard_tokens} tokens: "
            "remove it and build it with larger shards."
        )
    order = sorted_positions(tokens, catalogue.vocabulary, catalogue.depth, progress)
    tokens_path, order_path = shard_paths(target, number)
    return Shard(
        tokens.size,
        order.size,
        _write(tokens_path, tokens),
        _write(order_path, order),
        next_piece.file,
        next_piece.number,
    )


def _write(path: Path, content: np.ndarray) -> str:
    """Writes an array and returns its checksum."""
    data = content.data.cast("B") if content.size else b""  # an empty array cannot be cast
    with whole_file(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # the catalogue must not name a shard that a power cut could lose
    return hashlib.sha256(data).hexdigest()


def sorted_positions(tokens: np.ndarray, vocabulary: int, depth: int, progress: Progress = silent) -> np.ndarray:
    """The positions with a token on either side, sorted by the `depth` tokens before them, nearest first.

    A radix sort: one stable pass per token, farthest first. Ids from `vocabulary` on are separators and sort last; ties
    stay in text order. Tokens before a separator count too, which makes no difference to a search.
    """
    inside = tokens < vocabulary
    order = np.flatnonzero(inside[1:] & inside[:-1]).astype(np.uint32)
    order += 1
    spare = np.empty_like(order)
    for back in range(depth, 0, -1):
        _pass(tokens, order, spare, back, vocabulary)
        order, spare = spare, order
        progress("Sorting", depth + 1 - back, depth)
    return order


@compiled
def _rank(tokens: np.ndarray, position: int, vocabulary: int) -> int:
    return min(signed(tokens, position), vocabulary) if position >= 0 else vocabulary


@compiled
def _counting_pass(tokens: np.ndarray, order: np.ndarray, target: np.ndarray, back: int, vocabulary: int) -> None:
    """Sorts `order` into `target` by the token `back` positions before each entry."""
    starts = np.zeros(vocabulary + 2, np.int64)
    for position in range(1, tokens.size):  # text order gives the same counts as `order`, and is faster
        if tokens[position] < vocabulary and tokens[position - 1] < vocabulary:
            starts[_rank(tokens, position - back, vocabulary) + 1] += 1
    for rank in range(vocabulary + 1):
        starts[rank + 1] += starts[rank]
    for entry in range(order.size):
        rank = _rank(tokens, signed(order, entry) - back, vocabulary)
        target[starts[rank]] = order[entry]
        starts[rank] += 1


def _numpy_pass(tokens: np.ndarray, order: np.ndarray, target: np.ndarray, back: int, vocabulary: int) -> None:
    """`_counting_pass` with numpy alone."""
    positions = order.astype(np.int64) - back
    inside = np.minimum(tokens[np.maximum(positions, 0)], vocabulary)
    ranks = np.where(positions >= 0, inside, vocabulary).astype(np.uint32)
    target[:] = order
    for shift in (0, 16):  # numpy has a radix sort for 16 bits, and compares wider numbers
        permutation = np.argsort((ranks >> shift).astype(np.uint16), kind="stable")
        ranks, target[:] = ranks[permutation], target[permutation]


_pass = _numpy_pass if njit is None else _counting_pass
