"""The stores of a model, opened by name."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

from hierspec.assembly.vocabulary import Vocabulary
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Store
from hierspec.stores import Home, open_store


class OpenStores:
    """Each store is opened when a plan first names it, and then shared by all requests."""

    def __init__(
        self, vocabulary: Vocabulary, folder: str | Path | None = None, history: str | Path | None = None
    ) -> None:
        self._vocabulary, self._folder, self._history = vocabulary, folder, history
        self._stores: dict[str, Store | None] = {}  # by name; None: an optional one ("corpus?") that does not exist
        self._added: dict[str, Store] = {}  # those given to `add`
        self._lasting = True  # whether a history may be written to disk

    @cached_property
    def home(self) -> Home:
        """Where this model's databases are on disk. Made only when needed: hashing a vocabulary takes time."""
        return self._vocabulary.home(self._folder, self._history)

    def open(self, names: Sequence[str]) -> tuple[Store, ...]:
        """The stores of these names, without optional ones that do not exist."""
        stores = [self._open(name) for name in names]
        return tuple(store for store in stores if store is not None)

    def add(self, store: Store) -> None:
        """Let plans name this store."""
        self._stores[store.name] = self._added[store.name] = store

    def apart(self) -> OpenStores:
        """The same stores, opened again as they were built; they write nothing to disk. Added ones are shared."""
        other = copy(self)
        other._stores, other._added, other._lasting = dict(self._added), dict(self._added), False
        return other

    def flush(self) -> None:
        """Write unsaved entries to disk. If one store fails, the others are still written."""
        failures = []
        for store in self._stores.values():
            try:
                if store is not None:
                    store.flush()
            except HierspecError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _open(self, name: str) -> Store | None:
        required = name.removesuffix("?")
        if name not in self._stores and required not in self._stores:
            self._stores[name] = open_store(name, self.home, self._lasting)
        return self._stores.get(required, self._stores.get(name))
