"""Array loops, compiled where numba is installed and plain, slow Python where it is not.

numba caches machine code next to the file of the function that Python calls. It recompiles when that file changes, but
not when a compiled function called from another file changes: after such an edit, delete `__pycache__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

njit: Any
try:
    from numba import njit
except ImportError:
    njit = None

Function = TypeVar("Function", bound=Callable[..., Any])


def _compile(function: Function, **options: Any) -> Function:
    if njit is None:
        return function
    dispatcher: Function
    try:
        dispatcher = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to cache in: every process compiles again
        dispatcher = njit(**options)(function)
    return dispatcher


def compiled(function: Function) -> Function:
    """For long loops: releases the GIL, so other Python threads keep running."""
    return _compile(function, nogil=True)


def compiled_brief(function: Function) -> Function:
    """For calls of microseconds: holds the GIL, so a call is atomic and needs no lock."""
    return _compile(function)
