"""What can only guess: token databases, by name. Other packages add theirs under the entry point `hierspec.stores`."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points

from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Store
from hierspec.stores.context import ContextStore

BUILT_IN: dict[str, type[Store]] = {"context": ContextStore}


def open_store(name: str) -> Store:
    """A new store of this kind."""
    kind = BUILT_IN.get(name)
    if kind is not None:
        return kind()
    others = {entry.name: entry for entry in entry_points(group="hierspec.stores")}
    if name not in others:
        names = sorted({*BUILT_IN, *others})
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise HierspecError(f"There is no store {name!r}{hint}; stores are {', '.join(names)}.")
    store: Store = others[name].load()()
    return store
