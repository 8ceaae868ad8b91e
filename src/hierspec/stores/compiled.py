"""Functions of loops over arrays, compiled where numba is there and plain Python, slowly, where it is not.

Machine code is kept beside the file of the function that Python calls. numba notices when that file changes, but not
when a compiled function that it calls changes in another file: after such an edit, delete `__pycache__`.
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
    made: Function
    try:
        made = njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep the machine code: it is made anew in every process
        made = njit(**options)(function)
    return made


def compiled(function: Function) -> Function:
    """For long work: other Python threads go on meanwhile."""
    return _compile(function, nogil=True)


def compiled_brief(function: Function) -> Function:
    """For calls of microseconds: no other Python thread comes between, so a call is whole and needs no lock."""
    return _compile(function)
