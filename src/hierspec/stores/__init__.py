"""What can only guess: token databases, by name. Other packages add theirs under the entry point `hierspec.stores`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Store
from hierspec.stores.context import ContextStore, CopyStore
from hierspec.stores.corpus import CorpusStore
from hierspec.stores.history import SHARED, HistoryStore
from hierspec.stores.lookahead import LookaheadStore


@dataclass(frozen=True)
class Home:
    """Where a model's databases lie, and the vocabulary that their ids are of."""

    folder: Path
    vocabulary_hash: str

    @property
    def history(self) -> Path:
        return self.folder / "history.sqlite"

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    def beginning(self) -> dict[str, str]:
        """What stores begin with when something is measured (`open_store` with lasting=False), in words."""
        return {
            "history": "a copy of what was built" if self.history.exists() else "empty",
            "corpus": "as built" if self.corpus.exists() else "none",
        }


def _history(home: Home, lasting: bool) -> Store:
    # Nobody's text goes to the disk unasked: a history outlives the process only where one was built or begun there.
    path = home.history if home.history.exists() else None
    store = HistoryStore(path if lasting else None, vocabulary_hash=home.vocabulary_hash, shared=True)
    if path is not None and not lasting:
        with HistoryStore(path, vocabulary_hash=home.vocabulary_hash) as built:
            for document in built.documents(SHARED):
                store.add(document, SHARED)
    return store


def _corpus(home: Home, lasting: bool) -> Store:
    if not home.corpus.exists():
        raise HierspecError(f"There is no corpus at {home.corpus}; build one with: hierspec store build corpus FILES…")
    return CorpusStore(home.corpus, home.vocabulary_hash, shortest=1)


BUILT_IN: dict[str, Callable[[Home, bool], Store]] = {
    "context": lambda home, lasting: ContextStore(),
    "copy": lambda home, lasting: CopyStore(),
    "lookahead": lambda home, lasting: LookaheadStore(),
    "history": _history,
    "corpus": _corpus,
}


def open_store(name: str, home: Home, lasting: bool = True) -> Store | None:
    """A store of this kind. A name that ends in "?" may be missing: then there is none.

    If not `lasting`, it begins with what was built for all and writes nothing to the disk, for measuring.
    """
    kind = name.removesuffix("?")
    if name == "corpus?" and not home.corpus.exists():
        return None
    if kind in BUILT_IN:
        return BUILT_IN[kind](home, lasting)
    others = {entry.name: entry for entry in entry_points(group="hierspec.stores")}
    if kind not in others:
        if kind != name:
            return None
        names = sorted({*BUILT_IN, *others})
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise HierspecError(f"There is no store {name!r}{hint}; stores are {', '.join(names)}.")
    store: Store = others[kind].load()()
    return store
