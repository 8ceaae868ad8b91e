"""Assembly for an x86 CPU with AMX, whatever CPU this is."""

from __future__ import annotations

import pytest
from llvmlite import binding, ir

_TRIPLE = "x86_64-unknown-linux-gnu"


def x86_assembly(module: ir.Module) -> tuple[str, bytes]:
    """As text, and as object code."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(_TRIPLE)
    except RuntimeError:
        pytest.skip("this LLVM cannot emit x86-64 code")
    module.triple = _TRIPLE
    machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
    parsed = binding.parse_assembly(str(module))
    return machine.emit_assembly(parsed), machine.emit_object(parsed)
