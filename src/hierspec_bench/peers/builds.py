"""Compiler options for engines that are compiled here: all instructions that the compiler finds, or fewer.

The compiler may find instructions that cannot run: a virtual machine can show instructions that the system underneath
does not permit (AMX needs permission), and a compiler may misidentify a new processor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# llama.cpp's switches for x86, and the flags in /proc/cpuinfo that each of them needs.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_F16C": ("f16c",),
    "GGML_AVX2": ("avx2",),
    "GGML_FMA": ("fma",),
    "GGML_BMI2": ("bmi2",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
}
_NEVER = ("GGML_AVX_VNNI", "GGML_AVX512_BF16", "GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_AMX_BF16")
_UP_TO_AVX2 = ("GGML_SSE42", "GGML_AVX", "GGML_F16C", "GGML_AVX2", "GGML_FMA", "GGML_BMI2")


@dataclass(frozen=True)
class Build:
    """Options of CMake, and a phrase that describes them: "compiled …"."""

    words: str
    cmake: str


NATIVE = Build("for all that the compiler finds in this processor", "-DGGML_NATIVE=ON -DGGML_OPENMP=ON")


def llama_builds(flags: Collection[str]) -> tuple[Build, ...]:
    """Builds for a processor with these flags, most instructions first; if one crashes, the next is tried."""
    wide = _switched_on(tuple(_NEEDS), flags)
    if "GGML_AVX512" not in wide:  # the other AVX-512 switches need this one
        wide = tuple(name for name in wide if not name.startswith("GGML_AVX512"))
    narrow = _switched_on(_UP_TO_AVX2, flags)
    builds = [NATIVE]
    for chosen in dict.fromkeys((wide, narrow)):
        if chosen:
            words = f"with {', '.join(name.removeprefix('GGML_') for name in chosen)} only"
            builds.append(Build(words, _switches(chosen)))
    return (*builds, Build("for any processor of its kind", _switches(())))


def _switched_on(names: tuple[str, ...], flags: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if all(needed in flags for needed in _NEEDS[name]))


def _switches(chosen: Collection[str]) -> str:
    states = {name: "ON" if name in chosen else "OFF" for name in (*_NEEDS, *_NEVER)}
    return " ".join(["-DGGML_NATIVE=OFF -DGGML_OPENMP=ON", *(f"-D{name}={state}" for name, state in states.items())])
