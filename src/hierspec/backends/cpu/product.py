"""Rows times packed weights, one block of 16 outputs after the other.

All functions here are routines: the code for a kind of weights is compiled when weights of that kind are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.amx import DEPTH, TILE_BYTES, begin_tiles, end_tiles, round_row, store_zeros
from hierspec.backends.cpu.byte_tiles import configure, has_byte_tiles, least_rows, over_rows_by_tiles, release
from hierspec.backends.cpu.compiled import library
from hierspec.backends.cpu.features import has_wide_registers
from hierspec.backends.cpu.forms import FILE_FORMS, LINE, Form
from hierspec.backends.cpu.forms import INT4 as INT4_FORM
from hierspec.backends.cpu.forms import INT8 as INT8_FORM
from hierspec.backends.cpu.kernels import emit_gate, normalise
from hierspec.backends.cpu.llvm import LANES, VectorWriter, i64
from hierspec.backends.cpu.quantised import quantise_for
from hierspec.backends.cpu.routines import Routine, RoutineLibrary, routine
from hierspec.backends.cpu.tiles import amx_steps, amx_tiles, block_tiles, transpose_rows, transposed_tiles
from hierspec.backends.cpu.vector_products import form_vectors, form_vectors_of_two, two_blocks_at_once

# Kinds of weights: float32, bfloat16, a form of `forms.py`, or bfloat16 in the tiles of `amx.py`.
FLOAT32, BFLOAT16, INT8, INT4, BFLOAT16_AMX = range(5)
FORM_OF_KIND = {INT8: INT8_FORM, INT4: INT4_FORM, **dict(enumerate(FILE_FORMS, start=5))}
_NAMES = ("float32", "bfloat16", "int8", "int4", "bfloat16_amx", *(form.name for form in FILE_FORMS))
AMX_SCRATCH_BYTES = 4 * (2 * LANES) ** 2
_FLOAT = 4  # bytes


class Code(IntEnum):
    """Indices of `product_code`: addresses of routines."""

    PREPARE = 0  # (x, rows, size, prepared, group_scales): puts inputs in the product's layout
    PRODUCT = 1  # (x, prepared, group_scales, rows, weights, size, out, out_step, first, last)
    ADD_PRODUCT = 2  # the same and (sums): added to sums [rows, out_step]
    GATED = 3  # (x, prepared, group_scales, rows, gates, ups, size, small, out, out_step, first, last)
    BEGIN = 4  # (scratch): before the products of a thread
    END = 5  # (scratch): after them
    NORMALISE = 6  # (x, weight, size, address of eps, out)
    GATE = 7  # (gates, gates_step, ups, rows): gates[row, 0:16] = silu of itself * ups[row, 0:16]


def _block_bytes(w: VectorWriter, size: Any, kind: int) -> Any:
    """Bytes of the weights of 16 outputs."""
    if kind == BFLOAT16_AMX:
        return w.times(amx_steps(w, size), TILE_BYTES)
    if form := FORM_OF_KIND.get(kind):
        used = w.times(w.b.sdiv(size, i64(form.unit)), form.unit_bytes)
        return w.b.and_(w.plus(used, LINE - 1), i64(-LINE))
    return w.times(size, LANES, 2 if kind == BFLOAT16 else _FLOAT)


def _prepare(kind: int) -> Routine:
    @routine(5)
    def prepare(w: VectorWriter, x: Any, rows: Any, size: Any, prepared: Any, group_scales: Any) -> None:
        """Puts the inputs of a product in its layout: AMX tiles, 8 bits, or transposed if that helps."""
        if kind == BFLOAT16_AMX:
            w.repeat(rows, lambda row: _round(w, x, row, size, prepared))
        elif form := FORM_OF_KIND.get(kind):
            groups = w.b.sdiv(w.times(rows, size), i64(form.group))
            quantise_for[form.group](w, x, groups, prepared, group_scales)
        elif has_wide_registers():
            transpose_rows(w, x, rows, size, prepared)

    return prepare


def _round(w: VectorWriter, x: Any, row: Any, size: Any, prepared: Any) -> None:
    """Rounds one row of inputs into its tiles."""
    steps, lanes = amx_steps(w, size), i64(LANES)
    first = w.plus(w.b.srem(row, lanes), w.b.sdiv(row, lanes), steps, LANES)
    target = w.plus(prepared, first, 2 * DEPTH)
    round_row(w, w.plus(x, row, size, _FLOAT), w.b.sdiv(size, lanes), target)
    with w.b.if_then(w.b.icmp_signed("!=", w.b.srem(size, i64(DEPTH)), i64(0))):
        store_zeros(w, w.plus(w.plus(target, DEPTH), w.b.sub(steps, i64(1)), TILE_BYTES))


prepare_for_amx = _prepare(BFLOAT16_AMX)


_form_tiles = {(form, blocks): over_rows_by_tiles(form, blocks) for form in FORM_OF_KIND.values() for blocks in (1, 2)}


def _block(kind: int) -> Callable[..., None]:
    """Emits one block of 16 outputs: (w, x, prepared, group_scales, rows, weights, size, out, out_step)."""

    def block(w: VectorWriter, x: Any, prepared: Any, group_scales: Any, rows: Any, weights: Any, *rest: Any) -> None:
        if form := FORM_OF_KIND.get(kind):
            form_vectors[form](w, prepared, rows, group_scales, weights, *rest)
        elif has_wide_registers():
            transposed_tiles[_NAMES[kind]](w, x, prepared, rows, weights, *rest)
        else:
            size = rest[0]
            block_tiles[_NAMES[kind], False](w, x, size, rows, weights, *rest)

    return block


def _vectors_of_two(kind: int) -> Routine | None:
    """The routine that multiplies two blocks by vectors at once, if there is one for this kind and CPU."""
    form = FORM_OF_KIND.get(kind)
    return form_vectors_of_two[form] if form and two_blocks_at_once() else None


@contextmanager
def _narrow(w: VectorWriter, kind: int, rows: Any, by_tiles: Callable[[Form], None]) -> Iterator[None]:
    """Emits the code in the block for rows that vectors multiply, and by_tiles(form) for more quantised rows if the
    CPU has tiles for them."""
    form = FORM_OF_KIND.get(kind)
    if not (form and has_byte_tiles()):
        yield
        return
    with w.b.if_else(w.b.icmp_signed(">=", rows, i64(least_rows(form)))) as (wide, narrow):
        with wide:
            configure(w, rows, form)
            by_tiles(form)
            release(w)
        with narrow:
            yield


def _product(kind: int) -> Routine:
    @routine(10)
    def product(  # type: ignore[no-untyped-def]
        w: VectorWriter, x, prepared, group_scales, rows, weights, size, out, out_step, first, last
    ) -> None:
        """Columns 16 * first .. 16 * last of x times packed weights.

        `prepared` and `group_scales` are from `_prepare`; with AMX, `group_scales` is AMX_SCRATCH_BYTES of scratch
        memory, and `begin_tiles` has been called.
        """
        step, count = _block_bytes(w, size, kind), w.b.sub(last, first)

        def two_blocks(number: Any) -> None:
            block = w.plus(first, number, 2)
            start, left = w.plus(weights, block, step), w.b.sub(last, block)
            blocks = w.b.select(w.b.icmp_signed("<", left, i64(2)), left, i64(2))
            target, second = w.plus(out, block, LANES * _FLOAT), w.b.add(start, step)
            amx_tiles(
                w, prepared, rows, start, second, blocks, size, target, out_step, i64(LANES * _FLOAT), group_scales
            )

        def one_block(number: Any) -> None:
            block = w.b.add(first, number)
            start, target = w.plus(weights, block, step), w.plus(out, block, LANES * _FLOAT)
            _block(kind)(w, x, prepared, group_scales, rows, start, size, target, out_step)

        def by_tiles(form: Form) -> None:
            in_pairs(_form_tiles[form, 2], _form_tiles[form, 1], 1)

        def in_pairs(of_two: Routine, of_rest: Routine, rest: int) -> None:
            """Two blocks at once. An odd last block is given to `of_rest` as often as that takes blocks."""

            def multiply(of: Routine, *numbers: Any) -> None:
                of_blocks: list[Any] = []
                for number in numbers:
                    block = w.b.add(first, number)
                    of_blocks += w.plus(weights, block, step), w.plus(out, block, LANES * _FLOAT)
                of(w, prepared, rows, group_scales, size, out_step, *of_blocks)

            w.repeat(w.b.sdiv(count, i64(2)), lambda pair: multiply(of_two, w.times(pair, 2), w.plus(i64(1), pair, 2)))
            with w.b.if_then(w.b.trunc(count, ir.IntType(1))):
                multiply(of_rest, *[w.plus(count, -1)] * rest)

        if kind == BFLOAT16_AMX:
            w.repeat(w.b.sdiv(w.plus(count, 1), i64(2)), two_blocks)
            return
        with _narrow(w, kind, rows, by_tiles):
            if of_two := _vectors_of_two(kind):
                in_pairs(of_two, of_two, 2)
            else:
                w.repeat(count, one_block)

    return product


def _add_product(product: Routine) -> Routine:
    @routine(11)
    def add_product(w: VectorWriter, *arguments: Any) -> None:
        """`product`, whose columns are then added to `sums`, which has the shape of `out`."""
        *given, sums = arguments
        rows, out, out_step, first, last = given[3], *given[6:]
        product(w, *given)

        def add_row(row: Any) -> None:
            def add(number: Any) -> None:
                lane = w.plus(w.times(row, out_step), w.b.add(first, number), LANES)
                w.store(w.b.fadd(w.load(sums, lane), w.load(out, lane)), sums, lane)

            w.repeat(w.b.sub(last, first), add)

        w.repeat(rows, add_row)

    return add_product


def _gated(kind: int) -> Routine:
    @routine(12)
    def gated(  # type: ignore[no-untyped-def]
        w: VectorWriter, x, prepared, group_scales, rows, gates, ups, size, small, out, out_step, first, last
    ) -> None:
        """silu(x times gates) * (x times ups), columns 16 * first .. 16 * last. `small` [2, rows, 16] is scratch."""
        step = _block_bytes(w, size, kind)
        second = w.plus(small, rows, LANES * _FLOAT)

        def one_block(number: Any, both: Routine | None = None) -> None:
            block = w.b.add(first, number)
            gate, up = w.plus(gates, block, step), w.plus(ups, block, step)
            if kind == BFLOAT16_AMX:
                offset = w.b.sub(second, small)
                amx_tiles(w, prepared, rows, gate, up, i64(2), size, small, i64(LANES), offset, group_scales)
            elif both:
                both(w, prepared, rows, group_scales, size, i64(LANES), gate, small, up, second)
            else:
                for weights, target in ((gate, small), (up, second)):
                    _block(kind)(w, x, prepared, group_scales, rows, weights, size, target, i64(LANES))

            def gate_row(row: Any) -> None:
                ours = w.times(row, LANES * _FLOAT)
                target = w.plus(out, w.plus(w.times(row, out_step), block, LANES), _FLOAT)
                emit_gate(w, w.b.add(small, ours), w.b.add(second, ours), target)

            w.repeat(rows, gate_row)

        count = w.b.sub(last, first)

        def by(both: Routine | None) -> None:
            w.repeat(count, lambda number: one_block(number, both))

        with _narrow(w, kind, rows, lambda form: by(_form_tiles[form, 2])):
            by(_vectors_of_two(kind))

    return gated


@routine(4)
def _gate(w: VectorWriter, gates: Any, gates_step: Any, ups: Any, rows: Any) -> None:
    """Applies the gate after products with gates and ups of different kinds, which `gated` cannot combine."""

    def gate_row(row: Any) -> None:
        target = w.plus(gates, row, gates_step, _FLOAT)
        emit_gate(w, target, w.plus(ups, row, LANES * _FLOAT), target)

    w.repeat(rows, gate_row)


@routine(1)
def _nothing(w: VectorWriter, unused: Any) -> None:
    """BEGIN and END for kinds of weights that need no tiles."""


@cache
def product_library(kind: int) -> RoutineLibrary:
    """The routines for weights of one kind, in the order of `Code`."""
    amx, product = kind == BFLOAT16_AMX, _product(kind)
    routines = {
        Code.PREPARE: _prepare(kind),
        Code.PRODUCT: product,
        Code.ADD_PRODUCT: _add_product(product),
        Code.GATED: _gated(kind),
        Code.BEGIN: begin_tiles if amx else _nothing,
        Code.END: end_tiles if amx else _nothing,
        Code.NORMALISE: normalise,
        Code.GATE: _gate,
    }
    return library(f"products_{_NAMES[kind]}", {code.name.lower(): routines[code] for code in Code})


def product_code(kind: int) -> np.ndarray:
    """Addresses of the routines, by `Code`; the first call on a machine compiles them."""
    return product_library(kind).addresses()
