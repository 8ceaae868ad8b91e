"""CPU features that kernels depend on. Detected at first use, never at import."""

from __future__ import annotations

import platform
from functools import cache

from llvmlite import binding


@cache
def has_wide_registers() -> bool:
    """Whether 16 floats are one register (AVX-512).

    The sum of one row is one chain of dependent steps. If 16 lanes are one register, a tile needs many rows before its
    chains fill the multipliers; if 16 lanes are four registers, four rows are enough.
    """
    return bool(binding.get_host_cpu_features().get("avx512f", False))


@cache
def has_wide_bytes() -> bool:
    """Whether instructions take 64 bytes at once (AVX-512 BW)."""
    return bool(binding.get_host_cpu_features().get("avx512bw", False))


@cache
def is_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")


@cache
def dot_instruction() -> str:
    """The instruction that adds products of bytes: four at once by sdot (ARM) or vpdpbusd (AVX-512 VNNI), two by
    vpmaddubsw (other x86 CPUs); "" if there is none."""
    features = binding.get_host_cpu_features()
    if features.get("avx512vnni", False):
        return "vpdpbusd"
    if not is_arm():
        return "vpmaddubsw" if features.get("avx2", False) else ""
    # LLVM does not list sdot as a feature, but emits it if it can. An instruction that LLVM does not know for this CPU
    # would end the process, so check what it emits.
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    return "sdot" if "sdot" in machine.emit_assembly(binding.parse_assembly(_SUM_OF_PRODUCTS)) else ""


@cache
def has_pair_products() -> bool:
    """Whether an instruction multiplies two rows of bytes with two others (ARM's i8mm)."""
    return is_arm() and bool(binding.get_host_cpu_features().get("i8mm", False))


_SUM_OF_PRODUCTS = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @sum(ptr %a, ptr %b) {
  %x = load <16 x i8>, ptr %a
  %y = load <16 x i8>, ptr %b
  %p = sext <16 x i8> %x to <16 x i32>
  %q = sext <16 x i8> %y to <16 x i32>
  %m = mul <16 x i32> %p, %q
  %r = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %m)
  ret i32 %r
}
"""
