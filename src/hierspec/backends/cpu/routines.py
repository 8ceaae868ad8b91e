"""Functions written in LLVM code alone: compiled without numba, cached as object code, called by address.

numba optimises and compiles a callee again for each of its callers, and for each of theirs. A library of routines is
compiled once, in tenths of a second, and only if something calls it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from hierspec.backends.cpu.llvm import VectorWriter
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file

_I64 = ir.IntType(64)
_OPTIMISATION = 3  # as in numba
_MADE_BY = f"llvmlite {llvmlite.__version__}, LLVM {binding.llvm_version_info}"


class Routine:
    """A function of addresses and sizes. Called with a writer it emits a call, defining itself in that module if
    needed."""

    def __init__(self, emit: Callable[..., None], arguments: int, optimised: Callable[[], bool]) -> None:
        self.__doc__ = emit.__doc__
        self._emit, self._optimised = emit, optimised
        self._type = ir.FunctionType(ir.VoidType(), [_I64] * arguments)

    def __call__(self, w: VectorWriter, *values: Any) -> None:
        name = f"{self._emit.__name__}.{id(self)}"
        function = w.b.module.globals.get(name)
        if function is None:
            function = self.define(w.b.module, name)
            function.linkage = "internal"
        w.b.call(function, values)

    def define(self, module: ir.Module, name: str) -> ir.Function:
        function = ir.Function(module, self._type, name)
        function.attributes.add("noinline")
        if not self._optimised():
            function.attributes.add("optnone")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        self._emit(VectorWriter(builder), *function.args)
        builder.ret_void()
        return function

    @cached_property
    def from_python(self) -> Callable[..., None]:
        """The routine as a Python callable, for tests."""
        library = RoutineLibrary("", {"only": self})
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(self._type.args))(int(library.addresses()[0]))

        def call(*arguments: int) -> None:
            function(*arguments)

        call.library = library  # type: ignore[attr-defined]  # it owns the code
        return call


def routine(arguments: int, optimised: Callable[[], bool] = lambda: True) -> Callable[[Callable[..., None]], Routine]:
    """A routine that emit(writer, *arguments) writes. `optimised`, asked when it is emitted: whether it must be
    fast."""
    return lambda emit: Routine(emit, arguments, optimised)


class RoutineLibrary:
    """Routines that are compiled together, by name."""

    def __init__(self, name: str, routines: Mapping[str, Routine], file: Callable[[str], Path | None] | None = None):
        """`file`: maps a key of everything but the routines' source to the path of the object file."""
        self.name, self._routines, self._file = name, routines, file

    def addresses(self) -> np.ndarray:
        """Addresses of the routines, in order: [routines] int64."""
        return self._loaded[0]

    def cached(self) -> bool:
        """Whether it is already loaded or cached on disk."""
        return "_loaded" in vars(self) or self._read() is not None

    @cached_property
    def _loaded(self) -> tuple[np.ndarray, Any]:
        code = self._read()
        if code is None:
            code = self._compiled()
            if (path := self._path) is not None:
                with suppress(HierspecError), whole_file(path) as temporary:  # else compiled every time
                    temporary.write_bytes(hashlib.sha256(code).digest() + code)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        addresses = [engine.get_function_address(name) for name in self._routines]
        assert all(addresses)
        return np.array(addresses, np.int64), engine

    @cached_property
    def _path(self) -> Path | None:
        if self._file is None:
            return None
        machine = cpu_target.target_context.codegen().magic_tuple()
        return self._file(hashlib.sha256(repr((self.name, machine, _MADE_BY)).encode()).hexdigest()[:20])

    def _read(self) -> bytes | None:
        """Object code from its file; None if the file is missing or damaged."""
        if self._path is None or not self._path.is_file():
            return None
        content = self._path.read_bytes()
        digest, code = content[:32], content[32:]
        return code if hashlib.sha256(code).digest() == digest else None

    def _compiled(self) -> bytes:
        module = ir.Module(self.name)
        machine = _target_machine()
        module.triple = machine.triple
        for name, one in self._routines.items():
            one.define(module, name)
        parsed = binding.parse_assembly(str(module))
        parsed.data_layout = str(machine.target_data)
        parsed.verify()
        options = binding.create_pipeline_tuning_options(_OPTIMISATION)
        options.loop_vectorization = options.slp_vectorization = True
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        return machine.emit_object(parsed)


def _target_machine() -> binding.TargetMachine:
    """A target machine for the CPU and features that numba compiles for."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    relocation = "static" if triple.startswith("x86") else "default"  # required by the JIT
    return binding.Target.from_triple(binding.get_process_triple()).create_target_machine(
        cpu=cpu, features=features, opt=_OPTIMISATION, reloc=relocation, codemodel="jitdefault", jit=True
    )


def _call_routine(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Calls the routine at an address with a tuple of int64, from a function that numba compiles."""
    signature = types.void(types.int64, types.UniTuple(types.int64, len(arguments)))

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        target, given = values
        numbers = [builder.extract_value(given, i) for i in range(len(arguments))]
        function = ir.FunctionType(ir.VoidType(), [_I64] * len(numbers))
        builder.call(builder.inttoptr(target, function.as_pointer()), numbers)
        return context.get_dummy_value()

    return signature, codegen


call_routine: Any = intrinsic(_call_routine)
