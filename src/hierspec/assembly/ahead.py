"""Starts to compile what a plan will need on a CPU, while torch is imported and a model is fetched and read."""

from __future__ import annotations

from threading import Event

from hierspec import compiling
from hierspec.scorers.alignment import ALIGNING
from hierspec.stores.tree import DRAFTING

_started = Event()


def start_compiling(stores: bool = True, sampling: bool = False) -> None:
    """For the compiled backend, once per process: a command calls it before `load` does, and knows more.

    `stores`: for plans that draft; `sampling`: for temperatures above 0.
    """
    if _started.is_set():
        return
    _started.set()
    try:
        from hierspec.backends.cpu.functions import needed_functions
    except ImportError:  # without numba there is nothing to compile
        return
    compiling.start([*needed_functions(draft_heads=True, sampling=sampling), *([DRAFTING, ALIGNING] if stores else [])])
