"""Guesses from a large text on disk: what followed wherever the last tokens stood in it.

A corpus is a folder with `corpus.json` and two files for every shard, mapped into memory and never read whole:
`tokens.NNN`, texts with a separator before, between and after them, and `order.NNN`, the places in them that have a
token on either side, sorted by what stands *before* each: the nearest token decides first. This is a suffix array of
the text read backwards. One binary search for the end of the context therefore arrives between the places that agree
with it longest, and places that agree less lie further and further outside.
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
from hierspec.progress import Progress, silent
from hierspec.stores.corpus_search import find
from hierspec.stores.tree import grow

FORMAT = "hierspec corpus 1"
DEPTH = 16  # tokens before a place that decide its rank; places that agree in all of them lie in the order of the text
MOST_SHARDS = 64
_SAMPLES = 16  # entries of each shard that are looked at when it is opened
_AGAIN = "remove the folder and build the corpus again"


@dataclass(frozen=True)
class Source:
    """A file that the text was read from."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A part of the corpus that is sorted by itself."""

    tokens: int  # separators included
    places: int
    tokens_sha256: str
    order_sha256: str
    next_file: int  # where the shard after this one begins: the file's number,
    next_piece: int  # and how many of its pieces come before


@dataclass(frozen=True)
class Catalogue:
    """What `corpus.json` says."""

    vocabulary: int
    vocabulary_hash: str
    depth: int
    shard_tokens: int
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...] = ()
    finished: bool = False

    @property
    def token_type(self) -> np.dtype[Any]:
        """The narrowest type whose largest value is no token: it is the separator."""
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
                raise HierspecError(f"{folder} was built by another version of hierspec: {_AGAIN}.")
            token_type = content.pop("token_type")
            sources = tuple(Source(**source) for source in content.pop("sources"))
            shards = tuple(Shard(**shard) for shard in content.pop("shards"))
            found = cls(sources=sources, shards=shards, **content)
            found._check_values(token_type)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HierspecError(f"{path} is damaged ({error}): {_AGAIN}.") from error
        return found

    def _check_values(self, token_type: object) -> None:
        parts: list[Catalogue | Source | Shard] = [self, *self.sources, *self.shards]
        for part in parts:
            for field in fields(part):
                value = getattr(part, field.name)
                if field.type in ("int", "str", "bool") and type(value).__name__ != field.type:
                    raise ValueError(f"{field.name} is {value!r}")
                if field.type == "int" and value < 0:
                    raise ValueError(f"{field.name} is negative")
        if token_type != self.token_type.name or not 1 <= self.depth <= 64:
            raise ValueError("token_type, vocabulary and depth do not fit together")
        if len(self.shards) > MOST_SHARDS:
            raise ValueError(f"it names {len(self.shards)} shards")


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"tokens.{number:03d}", folder / f"order.{number:03d}"


class CorpusStore(Store):
    """A corpus on disk. All requests share it and nothing is learnt: `begin` gives the store itself."""

    def __init__(
        self,
        path: Path,
        vocabulary_hash: str,
        name: str = "corpus",
        *,
        longest: int = 16,  # tokens of the context to look for
        shortest: int = 2,  # tokens in common that a place must have
        places: int = 64,  # that are looked at; of more, some evenly over all of them
        enough: int = 8,  # places; where so many are found, shorter matches are not asked
        depth: int = 16,  # tokens that are copied from a place
    ) -> None:
        self.name, self.path = name, Path(path)
        self.catalogue = Catalogue.read(self.path)
        if not self.catalogue.finished:
            raise HierspecError(f"{self.path} is half built: run the same build again, it goes on where it stopped.")
        if self.catalogue.vocabulary_hash != vocabulary_hash:
            raise HierspecError(
                f"{self.path} was built with another model's vocabulary: build a corpus for this model."
            )
        self.longest, self.shortest, self.depth = min(longest, self.catalogue.depth), max(1, shortest), depth
        self.places, self.enough = places, min(enough, places)
        tokens, orders = [], []
        for number, shard in enumerate(self.catalogue.shards):
            paths = shard_paths(self.path, number)
            tokens.append(_mapped(paths[0], self.catalogue.token_type, shard.tokens))
            orders.append(_mapped(paths[1], np.dtype("<u4"), shard.places))
            self._look_at(paths, tokens[-1], orders[-1])
        # The search is compiled anew for every number of shards: empty ones fill up to 1, 4, 16 or 64.
        while len(tokens) not in (1, 4, 16, 64):
            tokens.append(_nothing(self.catalogue.token_type))
            orders.append(_nothing(np.dtype("<u4")))
        self._tokens, self._orders = tuple(tokens), tuple(orders)

    def begin(self, prompt: np.ndarray, namespace: str = "") -> CorpusStore:
        return self

    def learn(self, tokens: Sequence[int]) -> None:
        """A corpus does not change."""

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        copied, lengths = self.find(context)
        ends = np.arange(0, copied.size, copied.shape[1])
        return grow(copied.ravel(), ends, lengths, budget, self.depth, self.name)

    def find(self, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What followed where the end of `context` stood: a row a place, ended by -1, and the tokens in common there.

        The longest matches come first. Shorter ones follow while there are fewer than `enough` places.
        """
        tail = np.ascontiguousarray(context[-self.longest :], np.int32)
        copied, lengths = np.empty((self.places, self.depth + 1), np.int32), np.empty(self.places, np.int32)
        count = find(
            self._tokens, self._orders, tail, self.shortest, self.enough, self.catalogue.vocabulary, copied, lengths
        )
        return copied[:count], lengths[:count]

    def info(self) -> dict[str, Any]:
        """What `hierspec store info` shows."""
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
        """Reads everything and compares it with the checksums; opening looks at sizes and a few entries only."""
        total, done = self.info()["bytes"], 0
        for number, shard in enumerate(self.catalogue.shards):
            for path, wanted in zip(
                shard_paths(self.path, number), (shard.tokens_sha256, shard.order_sha256), strict=True
            ):
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                        raise _damaged(path, "its checksum differs")
                done += path.stat().st_size
                progress(f"Checking {self.path.name}", done, total)

    def _look_at(self, paths: tuple[Path, Path], tokens: np.ndarray, order: np.ndarray) -> None:
        separator, depth = self.catalogue.separator, self.catalogue.depth
        if len(tokens) < 2 or tokens[0] != separator or tokens[-1] != separator:
            raise _damaged(paths[0], "it does not begin and end with a separator")
        before: tuple[int, ...] = ()
        for entry in range(0, len(order), len(order) // _SAMPLES + 1):
            place = int(order[entry])
            if not 1 < place < len(tokens) - 1 or separator in (tokens[place - 1], tokens[place]):
                raise _damaged(paths[1], "it points outside the text")
            key = tuple(tokens[max(0, place - depth) : place][::-1].tolist())
            key = key[: key.index(separator) + 1] if separator in key else key
            if key < before:
                raise _damaged(paths[1], "it is not sorted")
            before = key


def _mapped(path: Path, kind: np.dtype[Any], count: int) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size != count * kind.itemsize:
            raise _damaged(path, f"it has {size} bytes where {count * kind.itemsize} are due")
        # A plain view: numba takes longer to recognise a memmap at every call.
        return np.memmap(path, kind, "r").view(np.ndarray) if count else _nothing(kind)
    except FileNotFoundError as error:
        raise _damaged(path, "it is not there") from error
    except OSError as error:
        raise HierspecError(f"{path} cannot be read ({error.strerror or error}): check the disk.") from error


def _nothing(kind: np.dtype[Any]) -> np.ndarray:
    empty = np.empty(0, kind)
    empty.setflags(write=False)  # as mapped files are: for numba this is part of the type
    return empty


def _damaged(path: Path, reason: str) -> HierspecError:
    return HierspecError(f"{path} is damaged ({reason}): {_AGAIN}.")
