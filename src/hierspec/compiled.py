"""Array loops, compiled where numba is installed and plain, slow Python where it is not.

numba caches machine code next to the file of the function that Python calls. It recompiles when that file changes, but
not when a compiled function called from another file changes: after such an edit, delete `__pycache__`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hierspec.compiling import locked

njit: Any
try:
    from numba import njit, typeof
except ImportError:
    njit = None

Function = TypeVar("Function", bound=Callable[..., Any])


def _compile(function: Function, **options: Any) -> Function:
    if njit is None:
        return function
    dispatcher: Function
    options["no_cfunc_wrapper"] = True  # nobody calls it from C
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


def compiled_part(function: Function) -> Function:
    """For what only compiled functions call: compiled into them, and cached with them."""
    return function if njit is None else njit(no_cfunc_wrapper=True)(function)


class CompiledCalls:
    """Calls with typical arguments: numba compiles by the types of arguments. See `hierspec.compiling`."""

    def __init__(self, name: str, seconds: float, calls: Callable[[], Sequence[tuple[Any, tuple[Any, ...]]]]) -> None:
        self.name, self.seconds, self._calls = name, seconds, calls
        self._loaded = False

    def cached(self) -> bool:
        """Whether no worker needs to compile them: they are in the cache, or there is no cache to put them in."""
        return njit is None or self._loaded or all(_cached(*call) for call in self._calls())

    def load(self) -> None:
        """Compile them or read them from the cache, so that no request has to wait for it."""
        if not self._loaded:
            for function, arguments in self._calls():
                with locked(None if njit is None else function.stats.cache_path, function.__qualname__):
                    function(*arguments)
            self._loaded = True


def _cached(function: Any, arguments: tuple[Any, ...]) -> bool:
    if function.stats.cache_path is None:
        return True
    signature = tuple(typeof(argument) for argument in arguments)
    return function._cache.load_overload(signature, function.targetctx) is not None
