"""Quantisation of weights, once, and of rows of inputs, before every product.

A row of inputs is quantised to 8 bits, one group at a time. Its sums of products are then integers, which do not depend
on the order of addition, and only one multiplication by the scales per group is rounded. So these products have the
same bits at every width, whatever instructions compute the sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.forms import FORMS, INT4, INT8, Form, arrange
from hierspec.backends.cpu.llvm import LANES, V16F32, V16I32, VectorWriter, i64, splat_i32
from hierspec.backends.cpu.routines import Routine, routine
from hierspec.checkpoints.gguf_blocks import UnpackedBlocks

# Words per group of a row of inputs: its scale, scale * sum of its integers, -128 * sum as an integer, 0.
WORDS_PER_GROUP = 4
_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()


def input_quantiser(size: int) -> Routine:
    @routine(4)
    def quantise_inputs(w: VectorWriter, x: Any, groups: Any, out: Any, group_scales: Any) -> None:
        """Quantises x to 8 bits in `out`, and stores WORDS_PER_GROUP words per group in `group_scales`."""

        def group(g: Any, carried: list[Any]) -> list[Any]:
            first = w.b.mul(g, i64(size))
            parts = [w.load(x, w.b.add(first, i64(start))) for start in range(0, size, LANES)]
            larger, *others = [w.call("llvm.fabs.v16f32", part) for part in parts]
            for other in others:
                larger = w.call("llvm.maxnum.v16f32", larger, other)
            largest = w.fold(larger, lambda a, b: w.b.select(w.b.fcmp_ordered(">", a, b), a, b))
            scale = w.b.fmul(largest, ir.Constant(_F32, 1 / 127))
            all_zero = w.b.fcmp_ordered("==", largest, ir.Constant(_F32, 0.0))
            factor = w.b.select(all_zero, ir.Constant(_F32, 0.0), w.b.fdiv(ir.Constant(_F32, 127.0), largest))
            factors = w.splat(factor)
            total = splat_i32(0)
            for number, part in enumerate(parts):
                rounded = w.b.fptosi(w.call("llvm.rint.v16f32", w.b.fmul(part, factors)), V16I32)
                total = w.b.add(total, rounded)
                target = w.at(out, w.b.add(first, i64(number * LANES)), 1)
                w.b.store(w.b.trunc(rounded, ir.VectorType(_I8, LANES)), target, align=1)
            # A sum of at most 64 * 127 is exact as a float, in any order.
            summed = w.fold(w.b.sitofp(total, V16F32), w.b.fadd)
            words = [scale, w.b.fmul(scale, summed), w.b.fptosi(w.b.fmul(summed, ir.Constant(_F32, -128.0)), _I32)]
            for index, word in enumerate(words):
                target = w.at(group_scales, w.b.add(w.b.mul(g, i64(WORDS_PER_GROUP)), i64(index)))
                w.b.store(word, target, align=4)
            return []

        w.loop(groups, [], group)

    return quantise_inputs


quantise_for = {group: input_quantiser(group) for group in sorted({form.group for form in FORMS})}


def quantise_weights(weight: np.ndarray, form: Form) -> np.ndarray:
    """Quantises [outputs, inputs] floats to blocks [outputs / 16, bytes of a block], as INT8 or INT4."""
    outputs, inputs = weight.shape
    assert form in (INT8, INT4)
    groups = np.ascontiguousarray(weight, np.float32).reshape(outputs * inputs // form.group, form.group)
    return arrange((_to_int8 if form == INT8 else _to_int4)(groups), outputs, form)


def _to_int8(groups: np.ndarray) -> UnpackedBlocks:
    """Symmetric: the largest becomes 127. Weights that came from such groups are recovered exactly."""
    scales = (np.abs(groups).max(axis=1) / np.float32(127)).astype(np.float16)
    integers = np.clip(np.rint(groups / _divisor(scales)), -127, 127).astype(np.int8)
    return UnpackedBlocks(integers, scales)


def _to_int4(groups: np.ndarray) -> UnpackedBlocks:
    """16 levels from the smallest to the largest weight of a group.

    Weights that came from such blocks (GGUF Q4_0, Q4_1) are recovered exactly: their values lie on a grid, which may
    not use all 16 levels, so we search for that grid.
    """
    offsets = groups.min(axis=1).astype(np.float16)
    above = groups - offsets.astype(np.float32)[:, None]
    largest = above.max(axis=1)
    scales = (largest / np.float32(15)).astype(np.float16)
    unfitting = np.flatnonzero(~_on_grid(above, scales))
    for levels in range(14, 0, -1):
        candidates = (largest[unfitting] / np.float32(levels)).astype(np.float16)
        fits = _on_grid(above[unfitting], candidates)
        scales[unfitting[fits]] = candidates[fits]
        unfitting = unfitting[~fits]
    integers = np.clip(np.rint(above / _divisor(scales)), 0, 15).astype(np.int8)
    return UnpackedBlocks(integers, scales, offset=offsets)


def _on_grid(above: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Whether all numbers of a group are integer multiples of its scale."""
    divisor, fits = _divisor(scales), np.ones(len(above), bool)
    for part in (slice(0, 4), slice(4, None)):  # the first few numbers already rule out most groups
        steps = above[fits, part] / divisor[fits]
        fits[fits] = (np.abs(steps - np.rint(steps)) < 2e-4).all(axis=1)
    return fits


def _divisor(scales: np.ndarray) -> np.ndarray:
    column = scales.astype(np.float32)[:, None]
    return np.where(column > 0, column, np.float32(1))
