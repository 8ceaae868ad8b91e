"""Emits the code that reads groups of quantised weights: addresses of integers, and scales and offsets as floats."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.features import dot_instruction
from hierspec.backends.cpu.forms import LINE, Form, scales_apart
from hierspec.backends.cpu.llvm import LANES, VectorWriter, i64

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
PREFETCHED_TO = 2  # cache level to prefetch into: L2
MAGIC = 3 << 22  # float in whose bits integer sums start, see `initial_sum`
_LARGE = 1 << 23  # a float whose last bit counts ones
_LARGE_BITS = int(np.float32(_LARGE).view(np.int32))


def converts_slowly() -> bool:
    """Whether converting integers to floats is slow: on a Neoverse-N1 it takes 2 cycles on one of two units."""
    return dot_instruction() == "sdot"


def initial_sum() -> int:
    """The start value of integer sums: zero, or a trick that avoids converting them to floats.

    If conversion is slow, sums start at the bits of a float so large that its last bit counts ones. A sum of less than
    2**22, read as a float, then only needs that float subtracted, and nothing is rounded.
    """
    return int(np.float32(MAGIC).view(np.int32)) if converts_slowly() else 0


class GroupReader:
    """Emits reads of a block of weights, for some of its 16 outputs."""

    def __init__(
        self, w: VectorWriter, form: Form, block: Any, groups: Any, first: int = 0, outputs: int = LANES
    ) -> None:
        self._w, self._form, self._block, self._first = w, form, block, first
        # Bytes from one group to the next, if each has its own scale.
        self._integer_step, self._half_step = form.unit_bytes, form.unit_bytes
        self._behind_integers = w.plus(block, form.integer_bytes)
        if scales_apart():
            self._integer_step, self._half_step = form.integer_bytes, form.half_bytes
            self._behind_integers = w.plus(block, groups, form.integer_bytes)
        self._integers, self._floats = ir.VectorType(_I32, outputs), ir.VectorType(_F32, outputs)
        self._octets, self._halves = ir.VectorType(_I8, outputs), ir.VectorType(ir.HalfType(), outputs)

    def integers(self, unit: Any, group: Any) -> Any:
        """The address of a group's integers; `group` is its index in the unit."""
        w, form = self._w, self._form
        if not form.multiplied:
            return w.plus(self._block, unit, self._integer_step)
        start = w.plus(w.plus(self._block, form.integers_start), unit, form.unit_bytes)
        return w.plus(start, group, form.integer_bytes)

    def of_unit(self, unit: Any) -> tuple[Any, Any]:
        """What all groups of a unit share: d, and the offset (or None), which is the negated scale of the minimums if
        groups have multipliers."""
        w, form = self._w, self._form
        if form.multiplied:
            start = w.plus(self._block, unit, form.unit_bytes)
        else:
            start = w.plus(self._behind_integers, unit, self._half_step)
        if not form.offsets:
            return self._as_floats(start), None
        offset = self._as_floats(w.plus(start, 2 * LANES))
        if form.multiplied:  # minimums are subtracted
            offset = w.b.fsub(ir.Constant(self._floats, [-0.0] * self._floats.count), offset)
        return self._as_floats(start), offset

    def of_group(self, unit: Any, group: Any, shared: tuple[Any, Any]) -> tuple[Any, Any]:
        """The scale and the offset (or None) of a group; `shared` is from `of_unit`."""
        w, form = self._w, self._form
        scale, offset = shared
        if form.multiplied:
            small = w.plus(w.plus(self._block, form.half_bytes), unit, form.unit_bytes)
            small = w.plus(small, group, LANES)
            scale = w.b.fmul(scale, self._small_as_floats(small))
            if offset is not None:
                offset = w.b.fmul(offset, self._small_as_floats(w.plus(small, form.groups * LANES)))
        return scale, offset

    def prefetch(self, number: Any, ahead: Any) -> None:
        """Prefetches this group's share of the weights `ahead` bytes further on; all groups together cover
        everything."""
        share = self._form.unit_bytes // self._form.groups
        start = self._w.plus(self._block, number, share)
        for line in range(0, share, LINE):
            self._w.prefetch(start, self._w.plus(ahead, line), 1, PREFETCHED_TO)

    def _as_floats(self, address: Any) -> Any:
        pointer = self._w.at(address, i64(self._first), 2)
        return self._w.b.fpext(self._w.b.load(pointer, typ=self._halves, align=2), self._floats)

    def _small_as_floats(self, address: Any) -> Any:
        """Integers of 8 bits as floats."""
        b, count = self._w.b, self._floats.count
        loaded = b.load(self._w.at(address, i64(self._first), 1), typ=self._octets, align=1)
        if not converts_slowly():
            return b.sitofp(b.sext(loaded, self._integers), self._floats)
        # The integer plus 128, in the last bits of a large float.
        above = b.zext(b.xor(loaded, ir.Constant(self._octets, [-128] * count)), self._integers)
        large = b.or_(above, ir.Constant(self._integers, [_LARGE_BITS] * count))
        return b.fsub(b.bitcast(large, self._floats), ir.Constant(self._floats, [float(_LARGE + 128)] * count))
