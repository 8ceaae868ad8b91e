"""Sums of products of bytes on x86 CPUs without VNNI (before 2019, and AMD's before Zen 4).

One instruction, vpmaddubsw, multiplies unsigned bytes by signed ones and adds pairs of products in 16 bits, with
saturation. So only as many steps are added in 16 bits as cannot saturate; then the sums are widened to 32 bits.
Nothing is ever cut off, and the bits are those of all other instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from hierspec.backends.cpu.features import has_wide_bytes
from hierspec.backends.cpu.forms import Form
from hierspec.backends.cpu.llvm import VectorWriter, i64

_LARGEST_INPUT, _LARGEST_SUM = 127, (1 << 15) - 1
_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


def register_bytes() -> int:
    return 64 if has_wide_bytes() else 32


def steps_in_16_bits(form: Form) -> int:
    """How many steps of four inputs can be added before a sum might overflow."""
    return _LARGEST_SUM // (2 * form.largest * _LARGEST_INPUT)


def add_in_16_bits(
    w: VectorWriter, totals: Sequence[Any], weights: Sequence[Any], rows: Sequence[Any], form: Form
) -> list[Any]:
    """Adds to each row's total[o] the sum of weights times inputs over all inputs of a group, for every output o.

    `weights`: for every four inputs [outputs, 4] bytes; `rows`: addresses of the inputs.
    """
    outputs, at_once = totals[0].type.count, register_bytes() // 4
    parts = [
        _add(w, form, [w.lanes(total, first, at_once) for total in totals],
             [w.lanes(step, 4 * first, 4 * at_once) for step in weights], rows)
        for first in range(0, outputs, at_once)
    ]  # fmt: skip
    return [w.concatenate(list(its)) for its in zip(*parts, strict=True)]


def _add(w: VectorWriter, form: Form, totals: Sequence[Any], weights: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
    results, most = [*totals], steps_in_16_bits(form)
    for start in range(0, len(weights), most):
        sums: list[Any] = [None] * len(rows)
        for step in range(start, min(start + most, len(weights))):
            weight = weights[step]
            sizes = _sizes(w, weight) if form.signed else weight
            for index, row in enumerate(rows):
                inputs = four_inputs(w, row, step, weight.type)
                if form.signed:
                    inputs = _with_sign_of(w, weight, inputs)
                pairs = _pairs_of_bytes(w, sizes, inputs)
                sums[index] = pairs if sums[index] is None else w.b.add(sums[index], pairs)
        results = [w.b.add(result, _pairs_of_words(w, its)) for result, its in zip(results, sums, strict=True)]
    return results


def four_inputs(w: VectorWriter, row: Any, step: int, kind: Any) -> Any:
    """The same four inputs for every output. Loaded where they are used: a broadcast from memory takes no
    multiplier."""
    words = ir.VectorType(_I32, kind.count // 4)
    word = w.b.load(w.at(row, i64(4 * step), 1), typ=_I32, align=1)
    single = w.b.insert_element(ir.Constant(words, ir.Undefined), word, ir.Constant(_I32, 0))
    spread = w.b.shuffle_vector(single, ir.Constant(words, ir.Undefined), ir.Constant(words, [0] * words.count))
    return w.b.bitcast(spread, kind)


def _sizes(w: VectorWriter, weight: Any) -> Any:
    """Absolute values, as unsigned bytes."""
    zeros = ir.Constant(weight.type, [0] * weight.type.count)
    return w.b.select(w.b.icmp_signed("<", weight, zeros), w.b.sub(zeros, weight), weight)


def _with_sign_of(w: VectorWriter, weight: Any, inputs: Any) -> Any:
    """Inputs with the sign of the weight: times the weight's absolute value they give the product."""
    kind = weight.type
    if kind.count == 32:
        return w.call("llvm.x86.avx2.psign.b", inputs, weight)
    zeros = ir.Constant(kind, [0] * kind.count)
    return w.b.select(w.b.icmp_signed("<", weight, zeros), w.b.sub(zeros, inputs), inputs)


def _pairs_of_bytes(w: VectorWriter, unsigned: Any, signed: Any) -> Any:
    """unsigned[2 * i] * signed[2 * i] + unsigned[2 * i + 1] * signed[2 * i + 1], in 16 bits."""
    kind = unsigned.type
    name = "llvm.x86.avx512.pmaddubs.w.512" if kind.count == 64 else "llvm.x86.avx2.pmadd.ub.sw"
    function = w.function(name, ir.VectorType(_I16, kind.count // 2), kind, kind)
    return w.b.call(function, [unsigned, signed])


def _pairs_of_words(w: VectorWriter, sums: Any) -> Any:
    """Adds pairs of neighbours, in 32 bits."""
    kind = sums.type
    name = "llvm.x86.avx512.pmaddw.d.512" if kind.count == 32 else "llvm.x86.avx2.pmadd.wd"
    function = w.function(name, ir.VectorType(_I32, kind.count // 2), kind, kind)
    return w.b.call(function, [sums, ir.Constant(kind, [1] * kind.count)])
