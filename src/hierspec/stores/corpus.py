"""Drafts from a large text on disk: what followed the longest matches of the last tokens.

A corpus is a folder with `corpus.json` and two memory-mapped files for every shard. `tokens.NNN` holds texts with a
separator before, between and after them. `order.NNN` is a suffix array of the reversed text: all positions with a token
on either side, sorted by the tokens *before* each, nearest first. One binary search for the end of the context ends
between the longest matches; moving outwards from there, matches get shorter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Store
from hierspec.core.proposal import Proposal
from hierspec.core.text_files import shown, why
from hierspec.in_use import claim, mark_used
from hierspec.progress import Progress, silent
from hierspec.stores.corpus_search import find
from hierspec.stores.tree import draft_from_matches

FORMAT = "hierspec corpus 1"
DEPTH = 16  # tokens that positions are sorted by; those that agree in all of them stay in text order
MAX_SHARDS = 64
_SAMPLES = 16  # entries of each shard that are checked when it is opened
_REBUILD = "remove the folder and build the corpus again"


@dataclass(frozen=True)
class Source:
    """A file that text was read from."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A part of the corpus with a suffix array of its own."""

    tokens: int  # separators included
    places: int  # entries of the suffix array
    tokens_sha256: str
    order_sha256: str
    next_file: int  # where the next shard starts: number of the source file
    next_piece: int  # where it starts in that file: number of the piece


@dataclass(frozen=True)
class Catalogue:
    """The contents of `corpus.json`."""

    vocabulary: int
    vocabulary_hash: str
    depth: int
    shard_tokens: int
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...] = ()
    finished: bool = False

    @property
    def token_type(self) -> np.dtype[Any]:
        """The narrowest type whose largest value is not a token id: that value is the separator."""
        return np.dtype("<u2" if self.vocabulary <= 0xFFFF else "<u4")

    @property
    def separator(self) -> int:
        return int(np.iinfo(self.token_type).max)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "token_type": self.token_type.name} | asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Catalogue:
        path = folder / "corpus.json"
        if not path.is_file():
            raise HierspecError(f"{folder} holds no corpus (there is no corpus.json): give the folder of a built one.")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise HierspecError(f"{folder} was built by another version of hierspec: {_REBUILD}.")
            token_type = content.pop("token_type")
            sources = tuple(Source(**source) for source in content.pop("sources"))
            shards = tuple(Shard(**shard) for shard in content.pop("shards"))
            catalogue = cls(sources=sources, shards=shards, **content)
            catalogue._check_values(path, token_type)
        except OSError as error:
            raise HierspecError(f"{path} cannot be read: {why(error)}; check the disk.") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _damaged(path, "it is not what a build writes") from error
        return catalogue

    def _check_values(self, path: Path, token_type: object) -> None:
        parts: list[Catalogue | Source | Shard] = [self, *self.sources, *self.shards]
        for part in parts:
            for field in fields(part):
                value = getattr(part, field.name)
                if field.type in ("int", "str", "bool") and type(value).__name__ != field.type:
                    raise _damaged(path, f"{field.name} is {shown(value)}")
                if field.type == "int" and not 0 <= value < 1 << 48:
                    raise _damaged(path, f"{field.name} is {shown(value)}")
        if token_type != self.token_type.name or not 1 <= self.depth <= 64:
            raise _damaged(path, "token_type, vocabulary and depth do not fit together")
        if len(self.shards) > MAX_SHARDS:
            raise _damaged(path, f"it names {len(self.shards)} shards")


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"tokens.{number:03d}", folder / f"order.{number:03d}"


class CorpusStore(Store):
    """A corpus on disk. All requests share it and it learns nothing."""

    def __init__(
        self,
        path: Path,
        vocabulary_hash: str,
        name: str = "corpus",
        *,
        longest: int = 16,  # tokens of a match, at most
        shortest: int = 2,  # tokens of a match, at least
        max_matches: int = 64,  # if there are more, evenly spaced samples of them
        enough: int = 8,  # matches; with this many, shorter ones are not searched
        depth: int = 16,  # tokens drafted after a match
    ) -> None:
        self.name, self.path = name, Path(path)
        claim(self.path)
        mark_used(self.path / "corpus.json")
        self.catalogue = Catalogue.read(self.path)
        if not self.catalogue.finished:
            raise HierspecError(f"{self.path} is half built: run the same build again, it continues where it stopped.")
        if self.catalogue.vocabulary_hash != vocabulary_hash:
            raise HierspecError(
                f"{self.path} was built with another model's vocabulary: build a corpus for this model."
            )
        self.longest, self.shortest, self.depth = min(longest, self.catalogue.depth), max(1, shortest), depth
        self.max_matches, self.enough = max_matches, min(enough, max_matches)
        tokens, orders = [], []
        for number, shard in enumerate(self.catalogue.shards):
            paths = shard_paths(self.path, number)
            tokens.append(_map(paths[0], self.catalogue.token_type, shard.tokens))
            orders.append(_map(paths[1], np.dtype("<u4"), shard.places))
            self._check_samples(paths, tokens[-1], orders[-1])
        # numba compiles the search once per number of shards: pad with empty ones to 1, 4, 16 or 64.
        while len(tokens) not in (1, 4, 16, 64):
            tokens.append(_empty(self.catalogue.token_type))
            orders.append(_empty(np.dtype("<u4")))
        self._tokens, self._orders = tuple(tokens), tuple(orders)

    def begin(self, prompt: np.ndarray, namespace: str = "") -> CorpusStore:
        return self

    def learn(self, tokens: Sequence[int]) -> None:
        """A corpus does not change."""

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        continuations, lengths = self.find(context)
        starts = np.arange(0, continuations.size, continuations.shape[1])
        return draft_from_matches(continuations.ravel(), starts, lengths, budget, self.depth, self.name)

    def find(self, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What followed the matches of the end of `context`: a row each, ended by -1, and the match lengths.

        The longest matches come first. Shorter ones follow while there are fewer than `enough`.
        """
        tail = np.ascontiguousarray(context[-self.longest :], np.int32)
        continuations = np.empty((self.max_matches, self.depth + 1), np.int32)
        lengths = np.empty(self.max_matches, np.int32)
        vocabulary = self.catalogue.vocabulary
        count = find(self._tokens, self._orders, tail, self.shortest, self.enough, vocabulary, continuations, lengths)
        return continuations[:count], lengths[:count]

    def info(self) -> dict[str, Any]:
        """Shown by `hierspec store info`."""
        files = [path for number in range(len(self.catalogue.shards)) for path in shard_paths(self.path, number)]
        return {
            "kind": "corpus",
            "path": str(self.path),
            "tokens": sum(shard.tokens for shard in self.catalogue.shards),
            "places": sum(shard.places for shard in self.catalogue.shards),
            "shards": len(self.catalogue.shards),
            "bytes": sum(path.stat().st_size for path in files),
            "vocabulary": self.catalogue.vocabulary,
            "vocabulary_hash": self.catalogue.vocabulary_hash,
            "sources": [source.name for source in self.catalogue.sources],
        }

    def check(self, progress: Progress = silent) -> None:
        """Compares all files with their checksums; opening checks sizes and a few entries only."""
        total, done = self.info()["bytes"], 0
        for number, shard in enumerate(self.catalogue.shards):
            for path, expected in zip(
                shard_paths(self.path, number), (shard.tokens_sha256, shard.order_sha256), strict=True
            ):
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                        raise _damaged(path, "its checksum differs")
                done += path.stat().st_size
                progress(f"Checking {self.path.name}", done, total)

    def _check_samples(self, paths: tuple[Path, Path], tokens: np.ndarray, order: np.ndarray) -> None:
        separator, depth = self.catalogue.separator, self.catalogue.depth
        if len(tokens) < 2 or tokens[0] != separator or tokens[-1] != separator:
            raise _damaged(paths[0], "it does not start and end with a separator")
        previous: tuple[int, ...] = ()
        for entry in range(0, len(order), len(order) // _SAMPLES + 1):
            position = int(order[entry])
            if not 1 < position < len(tokens) - 1 or separator in (tokens[position - 1], tokens[position]):
                raise _damaged(paths[1], "it points outside the text")
            key = tuple(tokens[max(0, position - depth) : position][::-1].tolist())
            key = key[: key.index(separator) + 1] if separator in key else key
            if key < previous:
                raise _damaged(paths[1], "it is not sorted")
            previous = key


def _map(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise _damaged(path, f"it has {size} bytes instead of {count * dtype.itemsize}")
        # A plain array view: numba needs longer per call to find the type of a memmap.
        return np.memmap(path, dtype, "r").view(np.ndarray) if count else _empty(dtype)
    except FileNotFoundError as error:
        raise _damaged(path, "it is not there") from error
    except OSError as error:
        raise HierspecError(f"{path} cannot be read: {why(error)}; check the disk.") from error


def _empty(dtype: np.dtype[Any]) -> np.ndarray:
    empty = np.empty(0, dtype)
    empty.setflags(write=False)  # like mapped files: numba makes this part of the type
    return empty


def _damaged(path: Path, reason: str) -> HierspecError:
    return HierspecError(f"{path} is damaged ({reason}): {_REBUILD}.")
