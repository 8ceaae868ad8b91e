"""Functions that numba compiles at first use, and object code of routines; both are cached on disk.

A function declares its argument types, so it can be compiled before it has any arguments, and in another process
(`hierspec.compiling`).
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from hierspec.backends.cpu import amx
from hierspec.backends.cpu.routines import Routine, RoutineLibrary
from hierspec.compiling import locked

_KERNEL_FILES = (
    "llvm.py",
    "routines.py",
    "features.py",
    "exponentials.py",
    "kernels.py",
    "forms.py",
    "quantised.py",
    "group_reader.py",
    "vector_products.py",
    "short_sums.py",
    "byte_tiles.py",
    "pair_products.py",
    "amx.py",
    "compiled.py",
    "tiles.py",
    "sdot_tiles.py",
    "product.py",
    "layer_products.py",
    "layers.py",
    "attention_kernels.py",
    "kv_pages.py",
    "attention_segments.py",
    "attention.py",
    "amx_cache.py",
    "amx_segments.py",
    "amx_attention.py",
    "amx_attention_kernels.py",
    "amx_softmax.py",
    "sharing.py",
    "threads.py",
)
_FILTER_FILES = ("filters.py", "pick.py", "head_passes.py")

log = logging.getLogger("hierspec")
njit: Any = numba.njit  # its types do not list all of its options

# Argument types. Arrays are contiguous.
INT, FLOAT, DOUBLE = types.int64, types.float32, types.float64
INTS, INTS_2D, INT32S = types.int64[::1], types.int64[:, ::1], types.int32[::1]
BOOLS, BOOLS_2D, SHORTS_2D = types.boolean[::1], types.boolean[:, ::1], types.int16[:, ::1]
BYTES_2D, BYTES_3D = types.int8[:, ::1], types.int8[:, :, ::1]
FLOATS, FLOATS_2D, FLOATS_3D = types.float32[::1], types.float32[:, ::1], types.float32[:, :, ::1]
FLOATS_4D = types.float32[:, :, :, ::1]
DOUBLES, DOUBLES_2D, TRIPLE = types.float64[::1], types.float64[:, ::1], types.UniTuple(types.float64, 3)

# Inlined by numba into its callers and cached with them. The Python wrapper stays: a call without one would crash.
part = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)


def _as_pointer(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


_pointer: Any = intrinsic(_as_pointer)


@part
def borrowed(array: Any) -> Any:
    """The same array without an owner, valid while a caller holds the array.

    numba counts references whenever a row is taken or a function is entered, each time with an atomic addition that
    waits for all stores before it. Arrays without an owner are not counted.
    """
    return numba.carray(_pointer(array.ctypes.data), array.shape, array.dtype)


@cache
def kernel_version() -> int:
    """Changes with the source of the kernels, and with AMX, which selects other kernels."""
    return zlib.crc32(b"tiles" if amx.available() else b"vectors", _checksum(_KERNEL_FILES))


@cache
def filter_version() -> float:
    """Changes with the source of the filters. `CompiledFunction` says why it is a float."""
    return float(_checksum(_FILTER_FILES, _checksum(_KERNEL_FILES)))


def _checksum(names: tuple[str, ...], start: int = 0) -> int:
    return zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in names), start)


class CompiledFunction:
    """A function that numba compiles or loads at its first use.

    numba caches compiled functions by their own source and signature; it does not see changes in the kernels that they
    call. So the last argument has a default, which becomes `version()`: a change in a kernel file is a new signature.
    numba's fast dispatch goes by type and treats all defaults of one type as the same; with two versions of one type,
    each call of some functions would take 0.3 ms more. So one version is an int and the other a float.
    """

    def __init__(
        self, function: Callable[..., None], version: Callable[[], float], arguments: tuple[Any, ...], seconds: float
    ) -> None:
        update_wrapper(self, function)
        self.py_func = function
        self.name = f"{function.__module__}:{function.__name__}"
        self.seconds = seconds
        self.types, self._version = arguments, version
        self._dispatcher: Any = None
        self._unready: Any = None  # the dispatcher before its code is loaded
        self._address: int | None = None
        self._making = threading.RLock()

    def __call__(self, *arguments: Any) -> None:
        (self._dispatcher or self.dispatcher())(*arguments)

    def dispatcher(self) -> Any:
        """numba's compiled function; several threads may call this at once."""
        with self._making:
            if self._dispatcher is None:
                if not self.cached():
                    log.info("Compiling for this processor, once: about %.0f s", self.seconds)
                self.load()
        return self._dispatcher

    def address(self) -> int:
        """The function's address, for `calls`."""
        if self._address is None:
            [code] = self.dispatcher().overloads.values()
            self._address = int(code.library.get_pointer_to_function(code.fndesc.llvm_func_name))
        return self._address

    def cached(self) -> bool:
        """Whether no worker needs to compile it: it is in the cache, or there is no cache."""
        with self._making:
            made = self._made()
            if self._dispatcher is not None or made.stats.cache_path is None:
                return True
            return made._cache.load_overload(self._signature(), made.targetctx) is not None

    def load(self) -> None:
        """Compiles the function or loads it from the cache; waits if another process is compiling it."""
        with self._making:
            made = self._made()
            with locked(made.stats.cache_path, self.py_func.__qualname__):
                made.compile(self._signature())
            self._dispatcher = made

    def _signature(self) -> tuple[Any, ...]:
        return (*self.types, types.Omitted(self._version()))

    def _made(self) -> Any:
        if self._unready is None:
            self.py_func.__defaults__ = (self._version(),)
            options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
            try:
                self._unready = njit(cache=True, **options)(self.py_func)
            except RuntimeError:  # no cache folder: every process compiles again
                self._unready = njit(**options)(self.py_func)
        return self._unready


def compiled(
    version: Callable[[], float], *arguments: Any, seconds: float
) -> Callable[[Callable[..., None]], CompiledFunction]:
    """`arguments` are the types of all but the last one; `seconds`: about what compiling takes, on a slow core."""
    return lambda function: CompiledFunction(function, version, arguments, seconds)


def calls(function: CompiledFunction) -> Any:
    """call(address, arguments) for other compiled functions: calls `function` at its address.

    `arguments` is a tuple of all arguments but the last. A function called by name would be compiled again with every
    caller.
    """

    def call(typing_context: Any, address: Any, arguments: Any) -> Any:
        given = function.types
        argument_types = (*given, types.Omitted(0))  # the omitted argument is not passed

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            convention = context.call_conv
            numbers = [builder.extract_value(values[1], i) for i in range(len(given))]
            pointer = convention.get_function_type(types.none, argument_types).as_pointer()
            callee = builder.inttoptr(values[0], pointer)
            convention.call_function(builder, callee, types.none, argument_types, [*numbers, None])
            return context.get_dummy_value()

        return types.void(types.int64, types.Tuple(given)), codegen

    return intrinsic(call)


def library(name: str, routines: Mapping[str, Routine]) -> RoutineLibrary:
    """Routines whose object code is cached in numba's cache folder."""

    def file(key: str) -> Path | None:
        with suppress(RuntimeError):  # no folder to cache in
            folder = njit(cache=True)(_nothing).stats.cache_path
            return Path(folder) / f"{name}-{kernel_version():08x}-{key}.o"
        return None

    return RoutineLibrary(name, routines, file)


def _nothing() -> None:
    """Its numba cache folder is the folder for everything in this file."""
