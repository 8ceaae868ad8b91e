"""The n-grams that most of the model's own answers have: what it often writes, whatever it is asked.

This is the model-dependent database of Hierarchy Drafting (arXiv 2502.05609): the 100,000 5-grams found in the most
documents; the last token leads to the four that follow it. The file is one line of JSON, then the n-grams as 32-bit
integers, those of the most documents first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Store
from hierspec.core.proposal import Proposal
from hierspec.core.text_files import why
from hierspec.paths import make_folder, whole_file
from hierspec.stores.path_tree import PathTree

FORMAT = "hierspec frequent 1"
SIZE = 5  # tokens of an n-gram
COUNT = 100_000  # n-grams
_LARGEST_COUNT = 10_000_000
_LONGEST_HEADER = 4096  # bytes
_LAST_EVIDENCE = 40  # classes of evidence: the rank of a candidate
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_AGAIN = "drop it and build it again"


def count_ngrams(
    documents: Iterable[np.ndarray], size: int = SIZE, count: int = COUNT
) -> tuple[np.ndarray, np.ndarray]:
    """The n-grams [n, size] that are in the most documents, best first, and in how many. Ties: the first seen."""
    texts, hashes, positions, before = [], [], [], 0
    for document in documents:
        if len(document) >= size:
            hashed, first = np.unique(_hashes(document, size), return_index=True)  # once per document
            hashes.append(hashed)
            positions.append(before + first)
            texts.append(document.astype(np.int32))
            before += len(document)
    if not texts:
        return np.empty((0, size), np.int32), np.empty(0, np.int64)
    text, position = np.concatenate(texts), np.concatenate(positions)
    _, first, in_documents = np.unique(np.concatenate(hashes), return_index=True, return_counts=True)
    position = position[first]
    best = np.lexsort((position, -in_documents))[:count]
    return text[position[best][:, None] + np.arange(size)], in_documents[best]


def _hashes(document: np.ndarray, size: int) -> np.ndarray:
    """64-bit hashes of all n-grams: a chance collision among millions is not to be expected."""
    ids, hashed = document.astype(np.uint64), np.zeros(len(document) - size + 1, np.uint64)
    for offset in range(size):
        hashed = (hashed ^ (hashed >> np.uint64(29)) ^ ids[offset : offset + len(hashed)]) * _MULTIPLIER
    return hashed ^ (hashed >> np.uint64(32))


def build_frequent(
    path: Path, documents: Iterable[np.ndarray], vocabulary_hash: str, size: int = SIZE, count: int = COUNT
) -> int:
    """Writes the file, in place of one that is there; returns how many n-grams it has."""
    if not 2 <= size <= 64 or not 1 <= count <= _LARGEST_COUNT:
        raise HierspecError(f"n-grams have 2 to 64 tokens, and there are 1 to {_LARGEST_COUNT:,} of them.")
    ngrams, _ = count_ngrams(documents, size, count)
    if not len(ngrams):
        raise HierspecError("There is no text to count: build a history first, with hierspec store build history.")
    content = ngrams.astype("<i4").tobytes()
    header = {
        "format": FORMAT,
        "vocabulary_hash": vocabulary_hash,
        "size": size,
        "count": len(ngrams),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    make_folder(path.parent)
    with whole_file(path) as temporary:
        temporary.write_bytes(json.dumps(header).encode() + b"\n" + content)
    return len(ngrams)


class FrequentStore(Store):
    """Those n-grams, by their first token. All requests share it and it learns nothing."""

    def __init__(self, path: Path, vocabulary_hash: str, name: str = "frequent", candidates: int = 7) -> None:
        self.name, self.path, self.candidates = name, path, candidates
        ngrams = _read(path, vocabulary_hash)
        order = np.argsort(ngrams[:, 0], kind="stable")  # stable: for each first token, the most frequent stay first
        self._firsts, self._rests = ngrams[order, 0].copy(), ngrams[order, 1:]

    def begin(self, prompt: np.ndarray, namespace: str = "") -> FrequentStore:
        return self

    def learn(self, tokens: Sequence[int]) -> None:
        """Does nothing: the n-grams were counted before."""

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        start = int(np.searchsorted(self._firsts, context[-1], "left"))
        stop = min(int(np.searchsorted(self._firsts, context[-1], "right")), start + self.candidates)
        tree = PathTree(budget)
        for rank, rest in enumerate(self._rests[start:stop].tolist(), 1):
            tree.add(rest, min(rank, _LAST_EVIDENCE))
        return tree.proposal(self.name)

    def info(self) -> dict[str, Any]:
        """Shown by `hierspec store info`."""
        return {
            "path": str(self.path),
            "ngrams": len(self._firsts),
            "size": 1 + self._rests.shape[1],
            "first_tokens": len(np.unique(self._firsts)),
            "bytes": self.path.stat().st_size,
        }


def _read(path: Path, vocabulary_hash: str) -> np.ndarray:
    """The n-grams [n, size], checked."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(_LONGEST_HEADER))
            size, count = int(header["size"]), int(header["count"])
            if header["format"] != FORMAT or not 2 <= size <= 64 or not 0 < count <= _LARGEST_COUNT:
                raise ValueError
            content = file.read(4 * size * count + 1)
    except OSError as error:
        raise HierspecError(
            f"{path} cannot be read: {why(error)}; build it with: hierspec store build frequent"
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise HierspecError(f"{path} is not what hierspec store build frequent writes: {_AGAIN}.") from error
    if header.get("vocabulary_hash") != vocabulary_hash:
        raise HierspecError(f"{path} was built with another model's vocabulary: {_AGAIN} for this model.")
    if len(content) != 4 * size * count or hashlib.sha256(content).hexdigest() != header.get("sha256"):
        raise HierspecError(f"{path} is damaged (its n-grams are not what was written): {_AGAIN}.")
    ngrams = np.frombuffer(content, "<i4").reshape(count, size)
    if ngrams.min() < 0:
        raise HierspecError(f"{path} is damaged (it holds negative token ids): {_AGAIN}.")
    return ngrams
