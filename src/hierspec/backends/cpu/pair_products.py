"""Sums of products of bytes by ARM's i8mm: one instruction, smmla, multiplies two rows of 8 inputs with two outputs.

That is twice as many products as sdot computes. The sums are integers, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from hierspec.backends.cpu.features import has_pair_products
from hierspec.backends.cpu.llvm import VectorWriter, i64

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_V4I32, _V16I8 = ir.VectorType(_I32, 4), ir.VectorType(_I8, 16)


def add_by_pairs(w: VectorWriter, totals: Sequence[Any], weights: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
    """Adds to each row's total[o] the sum of weights times inputs over all inputs of a group, for every output o.

    `weights`: for every four inputs [outputs, 4] bytes; `rows`: addresses of the inputs of an even number of rows.
    """
    outputs, row_pairs = totals[0].type.count, range(len(rows) // 2)
    # Sums of two rows and two outputs: [row 0: output 0, 1; row 1: output 0, 1].
    sums = [[_sums(w, totals[2 * p], totals[2 * p + 1], o) for o in range(0, outputs, 2)] for p in row_pairs]
    for step in range(0, len(weights), 2):
        words = [w.b.bitcast(part, ir.VectorType(_I32, outputs)) for part in weights[step : step + 2]]
        order = [lane for output in range(outputs) for lane in (output, outputs + output)]
        eights = w.b.shuffle_vector(*words, ir.Constant(ir.VectorType(_I32, 2 * outputs), order))
        for pair in row_pairs:
            inputs = _two_rows(w, rows[2 * pair], rows[2 * pair + 1], 4 * step)
            for number in range(outputs // 2):
                two_outputs = w.b.bitcast(w.lanes(eights, 4 * number, 4), _V16I8)
                sums[pair][number] = _multiply(w, sums[pair][number], inputs, two_outputs)
    return [w.concatenate([w.lanes(four, 2 * odd, 2) for four in sums[pair]]) for pair in row_pairs for odd in range(2)]


def _sums(w: VectorWriter, upper: Any, lower: Any, output: int) -> Any:
    count = upper.type.count
    lanes = [output, output + 1, count + output, count + output + 1]
    return w.b.shuffle_vector(upper, lower, ir.Constant(_V4I32, lanes))


def _two_rows(w: VectorWriter, upper: Any, lower: Any, offset: int) -> Any:
    pair = ir.Constant(ir.VectorType(_I64, 2), ir.Undefined)
    for number, row in enumerate((upper, lower)):
        eight = w.b.load(w.at(row, i64(offset), 1), typ=_I64, align=1)
        pair = w.b.insert_element(pair, eight, ir.Constant(_I32, number))
    return w.b.bitcast(pair, _V16I8)


def _multiply(w: VectorWriter, sums: Any, inputs: Any, weights: Any) -> Any:
    """sums[2 * row + output] += row `row` of `inputs` times row `output` of `weights`, 8 numbers each."""
    if has_pair_products():
        function = w.function("llvm.aarch64.neon.smmla.v4i32.v16i8", _V4I32, _V4I32, _V16I8, _V16I8)
        return w.b.call(function, [sums, inputs, weights])
    reduce = w.function("llvm.vector.reduce.add.v8i32", _I32, ir.VectorType(_I32, 8))
    for row in range(2):  # the same in more steps, for tests on CPUs without the instruction
        for output in range(2):
            one, two = (
                w.b.sext(w.lanes(of, 8 * number, 8), ir.VectorType(_I32, 8))
                for of, number in ((inputs, row), (weights, output))
            )
            index = ir.Constant(_I32, 2 * row + output)
            total = w.b.add(w.b.extract_element(sums, index), w.b.call(reduce, [w.b.mul(one, two)]))
            sums = w.b.insert_element(sums, total, index)
    return sums
