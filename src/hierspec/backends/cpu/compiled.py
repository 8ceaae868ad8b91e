"""Functions that numba compiles at their first call and caches on disk."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any

from numba import njit

from hierspec.backends.cpu import amx

_KERNEL_FILES = (
    "llvm.py",
    "features.py",
    "kernels.py",
    "quantised.py",
    "amx.py",
    "compiled.py",
    "product.py",
    "layers.py",
    "memory.py",
    "threads.py",
)
_FILTER_FILES = ("filters.py", "exponentials.py")

part = njit(nogil=True, error_model="numpy")  # compiled into its callers, and cached with them


@cache
def kernel_version() -> int:
    """Changes with the source of the kernels, and with AMX, for which there are other kernels."""
    return zlib.crc32(b"tiles" if amx.available() else b"vectors", _checksum(_KERNEL_FILES))


@cache
def filter_version() -> float:
    """Changes with the source of the filters. `CompiledFunction` says why it is a float."""
    return float(_checksum(_FILTER_FILES, _checksum(_KERNEL_FILES)))


def _checksum(names: tuple[str, ...], start: int = 0) -> int:
    return zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in names), start)


class CompiledFunction:
    """A function that is given to numba at its first call.

    numba caches compiled functions under their own source and signature, and does not see changes in the kernels that
    they call. So the last argument has a default, which becomes `version()`: a change in a file of kernels is a new
    signature. numba's fast dispatch goes by types and takes all defaults of one type for the same; with two versions of
    one type, each call of some functions would take 0.3 ms more. So there is one version that is an int, and one float.
    """

    def __init__(self, function: Callable[..., None], version: Callable[[], float]) -> None:
        update_wrapper(self, function)
        self.py_func = function
        self._version = version
        self._dispatcher: Any = None
        self._making = threading.Lock()

    def __call__(self, *arguments: Any) -> None:
        (self._dispatcher or self.dispatcher())(*arguments)

    def dispatcher(self) -> Any:
        """numba's compiled function; all threads of a team may come here at once."""
        with self._making:
            if self._dispatcher is None:
                self.py_func.__defaults__ = (self._version(),)
                self._dispatcher = njit(nogil=True, cache=True, error_model="numpy")(self.py_func)
        return self._dispatcher


def compiled(version: Callable[[], float]) -> Callable[[Callable[..., None]], CompiledFunction]:
    return lambda function: CompiledFunction(function, version)
