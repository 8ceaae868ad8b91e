"""Stores by name. Other packages add theirs under the entry point `hierspec.stores`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Store
from hierspec.stores.context import ContextStore, CopyStore
from hierspec.stores.corpus import Catalogue, CorpusStore
from hierspec.stores.frequent import FrequentStore
from hierspec.stores.history import SHARED, HistoryStore
from hierspec.stores.lookahead import LookaheadStore
from hierspec.stores.pld import PromptLookupStore
from hierspec.stores.redis_address import RedisAddress, is_url


@dataclass(frozen=True)
class Home:
    """The folder of a model's databases, and the hash of the vocabulary that their token ids belong to."""

    folder: Path
    vocabulary_hash: str
    model: str = ""  # its name
    named_history: str = ""  # a file or the URL of a database, where the history is not in the folder

    @property
    def history(self) -> Path:
        """The path of its file; not used if the history is in a database."""
        is_file = bool(self.named_history) and not is_url(self.named_history)
        return Path(self.named_history).expanduser() if is_file else self.folder / "history.sqlite"

    @property
    def history_url(self) -> str:
        """URL of the database that many servers share; empty: the history is a file, or in memory."""
        return self.named_history if is_url(self.named_history) else ""

    def has_history(self) -> bool:
        return bool(self.history_url) or self.history.exists()

    def open_history(self, shared: bool = False) -> HistoryStore:
        """The history that outlives the process; its file is made if it is missing."""
        if not self.history_url:
            return HistoryStore(self.history, vocabulary_hash=self.vocabulary_hash, shared=shared)
        from hierspec.stores.shared_history import SharedHistory

        address = RedisAddress.of(self.history_url)
        return SharedHistory(address, vocabulary_hash=self.vocabulary_hash, model=self.model, shared=shared)

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def frequent(self) -> Path:
        return self.folder / "frequent.ngrams"

    def beginning(self) -> dict[str, str]:
        """What the stores of a measurement start with (`open_store` with lasting=False), for its record."""
        return {
            "history": "a copy of what was built" if self.has_history() else "empty",
            "frequent": "as built" if self.frequent.exists() else "none",
            "corpus": self._corpus_made_of(),
        }

    def _corpus_made_of(self) -> str:
        """Its size and files by name, so that a record says what was looked up in."""
        if not self.corpus.exists():
            return "none"
        built = Catalogue.read(self.corpus)
        tokens = sum(shard.tokens for shard in built.shards)
        return f"as built, {tokens:,} tokens: {', '.join(source.name for source in built.sources)}"


def _history(home: Home, lasting: bool) -> Store:
    # Privacy: text goes to disk only where the user has created or named a history.
    if lasting and (home.named_history or home.has_history()):
        return home.open_history(shared=True)
    store = HistoryStore(vocabulary_hash=home.vocabulary_hash, shared=True)
    if home.has_history() and not lasting:
        with home.open_history() as built:
            for document in built.documents(SHARED):
                store.add(document, SHARED)
    return store


def check_history(named: str | Path | None) -> None:
    """Refuses a history that is named by the URL of a database which does not answer, in one sentence."""
    if named is None or not is_url(str(named)):
        return
    from hierspec.stores.redis_database import check_redis

    try:
        check_redis(RedisAddress.of(str(named)))
    except HierspecError as error:
        raise HierspecError(f"{error} (It is named by --history, or history= in Python.)") from error


def _corpus(home: Home, lasting: bool) -> Store:
    return CorpusStore(_built_corpus(home), home.vocabulary_hash, shortest=1)


def _pairs(home: Home, lasting: bool) -> Store:
    """The same corpus as Hierarchy Drafting uses it: up to 64 continuations of four tokens after the last two."""
    return CorpusStore(
        _built_corpus(home), home.vocabulary_hash, "pairs", longest=2, shortest=2, max_matches=64, enough=64, depth=4
    )


def _built_corpus(home: Home) -> Path:
    if not home.corpus.exists():
        raise HierspecError(
            f"There is no corpus at {home.corpus}; build one with: hierspec store build corpus --files FILE…"
        )
    return home.corpus


def _frequent(home: Home, lasting: bool) -> Store:
    if not home.frequent.exists():
        raise HierspecError(
            f"There are no frequent n-grams at {home.frequent}; build them with: hierspec store build history "
            "--prompts FILE, then hierspec store build frequent"
        )
    return FrequentStore(home.frequent, home.vocabulary_hash)


BUILT_IN: dict[str, Callable[[Home, bool], Store]] = {
    "context": lambda home, lasting: ContextStore(),
    "copy": lambda home, lasting: CopyStore(),
    "pld": lambda home, lasting: PromptLookupStore(),
    "lookahead": lambda home, lasting: LookaheadStore(),
    "history": _history,
    "frequent": _frequent,
    "corpus": _corpus,
    "pairs": _pairs,
}


def open_store(name: str, home: Home, lasting: bool = True) -> Store | None:
    """Opens a store by name. A name that ends in "?" is optional: None if there is no such store.

    `lasting=False` is for measuring: the store starts with what was built for all and writes nothing to disk.
    """
    base_name = name.removesuffix("?")
    needed = {"frequent?": home.frequent, "corpus?": home.corpus, "pairs?": home.corpus}
    if name in needed and not needed[name].exists():
        return None
    if base_name in BUILT_IN:
        return BUILT_IN[base_name](home, lasting)
    plugins = {entry.name: entry for entry in entry_points(group="hierspec.stores")}
    if base_name not in plugins:
        if base_name != name:
            return None
        names = sorted({*BUILT_IN, *plugins})
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise HierspecError(f"There is no store {name!r}{hint}; stores are {', '.join(names)}.")
    store: Store = plugins[base_name].load()()
    return store
