"""The dtype in which a model is faster on this CPU: measured once, and kept in the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hierspec import compiling
from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.core.errors import HierspecError
from hierspec.kept import KeptFile
from hierspec.machine import cpu_flags
from hierspec.progress import Progress, silent

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CANDIDATES = ("float32", "bfloat16")
_PROMPT, _ANSWER = 128, 128  # tokens of a typical request
_ROWS, _TOKENS = 3, 1.8  # rows of a pass that verifies a draft token or two, and tokens that it writes
_WORTH = 0.95  # bfloat16 must take at most this share of float32's time: float32 is more exact, so it wins ties
_SMALL = 8 << 20  # weights; a smaller model is fast in any dtype
_READ = 160 << 20  # bytes of weights that a narrow pass is timed with, whatever the dtype: more than most caches hold
_WIDE = 4 << 20  # weights that a wide pass is timed with
_VERSION = 1  # increase when another choice might be right


class Products(Protocol):
    def seconds(self, dtype: str, rows: int, most: int) -> float:
        """Time per weight of a pass over `rows` rows, measured with at most `most` weights."""


@dataclass(frozen=True)
class DtypeChoice:
    dtype: str
    seconds: Mapping[str, float] = field(default_factory=dict)  # of a typical request, by dtype; empty: not measured
    reason: str = ""  # if it was not measured

    def __str__(self) -> str:
        if not self.seconds:
            return f"{self.dtype}, {self.reason or 'without measuring'}"
        parts = ", ".join(f"{seconds:.2f} s in {dtype}" for dtype, seconds in self.seconds.items())
        return f"{self.dtype}, as measured: products of {_PROMPT} tokens read and {_ANSWER} written take {parts}"


class DtypeChooser:
    """What `auto` means for a model: `choose` is called with its configuration, before its weights are read."""

    def __init__(self, dtype: str, device: str, backend: str, weights: str, progress: Progress) -> None:
        if dtype != "auto" and dtype not in DTYPES:
            raise HierspecError(f"Unknown dtype {dtype!r}; choose auto, {', '.join(DTYPES)}.")
        self.choice = DtypeChoice(dtype)
        self._device, self._backend, self._weights, self._progress = device, backend, weights, progress

    def choose(self, config: DecoderConfig) -> torch.dtype:
        """bfloat16 on a GPU; on a CPU as measured, unless the weights are quantised anyway."""
        self.choice = DtypeChoice("bfloat16" if self._device.startswith("cuda") else "float32")
        if self._device == "cpu" and self._weights == "auto":
            self.choice = choose_dtype(config, self._backend, self._progress)
        return DTYPES[self.choice.dtype]


def choose_dtype(config: DecoderConfig, backend: str = "auto", progress: Progress = silent) -> DtypeChoice:
    """The dtype for this model on this machine's CPU, from the cache if it was measured before."""
    count = weights(config)
    if count < _SMALL:
        return DtypeChoice("float32")
    code = _compiled_code(config) if backend != "torch" else None
    if code is None and not cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"}:
        return DtypeChoice("float32")  # without instructions for it, torch takes many times as long in bfloat16
    file = KeptFile.here("costs", backend, code, config.hidden, count, _VERSION, name="dtype-{key}.json")

    def measure() -> DtypeChoice:
        compiling.finish(progress=progress)  # nothing else should run while passes are timed
        progress("Choosing a dtype (once)", 0, 0)
        choice = fastest(request_seconds(_products(config, backend, code is not None), count))
        progress("Choosing a dtype (once)", 1, 1)
        return choice

    return file.read_or_measure(
        from_json=lambda document: fastest({dtype: float(document["seconds"][dtype]) for dtype in CANDIDATES}),
        measure=measure,
        to_json=lambda choice: {"dtype": choice.dtype, "seconds": choice.seconds},
    )


def fastest(seconds: Mapping[str, float]) -> DtypeChoice:
    """bfloat16 if it is clearly faster, else float32."""
    return DtypeChoice("bfloat16" if seconds["bfloat16"] <= _WORTH * seconds["float32"] else "float32", seconds)


def request_seconds(products: Products, count: int) -> dict[str, float]:
    """What the products of a typical request take in each dtype: one wide pass, then narrow ones."""
    seconds = {}
    for dtype in CANDIDATES:
        wide, narrow = products.seconds(dtype, _PROMPT, _WIDE), products.seconds(dtype, _ROWS, _READ)
        seconds[dtype] = count * (wide + _ANSWER / _TOKENS * narrow)
    return seconds


def weights(config: DecoderConfig) -> int:
    """How many weights a pass multiplies with."""
    tensors = expected_tensors(config).items()
    shapes = [shape for name, shape in tensors if len(shape) == 2 and (config.tied or "embed_tokens" not in name)]
    return sum(math.prod(shape) for shape in shapes)


def _compiled_code(config: DecoderConfig) -> int | None:
    """The version of the compiled code if it can run this model, else None."""
    try:
        from hierspec.backends.cpu.backend import CpuBackend
        from hierspec.backends.cpu.compiled import kernel_version
    except ImportError:
        return None
    return None if CpuBackend(1).refuses(config, "float32") else kernel_version()


def _products(config: DecoderConfig, backend: str, compiled: bool) -> Products:
    if not compiled:
        return TorchProducts(config.hidden)
    from hierspec.backends.cpu.speed import CompiledProducts

    read = min(_READ, 4 * weights(config))
    return CompiledProducts(config, torch.get_num_threads(), read, matrices=backend != "compiled-vectors")


class TorchProducts:
    """The products as torch computes them."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden

    def seconds(self, dtype: str, rows: int, most: int) -> float:
        kind, best = getattr(torch, dtype), float("inf")
        outputs = max(16, min(most, _READ // kind.itemsize) // self._hidden)
        matrix, inputs = torch.ones(outputs, self._hidden, dtype=kind), torch.ones(rows, self._hidden, dtype=kind)
        with torch.inference_mode():
            for _ in range(4):
                began = time.perf_counter()
                torch.nn.functional.linear(inputs, matrix)
                best = min(best, time.perf_counter() - began)
        return best / matrix.numel()
