"""Rows times packed weights: one block of 16 outputs after the other, rows in tiles as large as the registers allow.

Whatever tile a row is in, each of its outputs is the same chain of steps, so its bits do not depend on its company.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from numba import njit

from hierspec.backends.cpu.amx import DEPTH, TILE_BYTES, fill_up, round_row, tile_product
from hierspec.backends.cpu.kernels import (
    LANES,
    WIDE,
    copy_lanes,
    half_tile_1,
    half_tile_2,
    half_tile_3,
    half_tile_4,
    onto_1,
    onto_2,
    onto_3,
    onto_4,
    tile_1,
    tile_2,
    tile_3,
    tile_4,
    turn_8,
    turn_16,
    turned_half_tile_8,
    turned_half_tile_16,
    turned_tile_8,
    turned_tile_16,
)  # fmt: skip
from hierspec.backends.cpu.quantised import (
    BLOCK_BYTES,
    BYTE_GROUP,
    NIBBLE_GROUP,
    RECORD,
    byte_tile_1,
    byte_tile_2,
    byte_tile_3,
    byte_tile_4,
    byte_tile_8,
    nibble_tile_1,
    nibble_tile_2,
    nibble_tile_3,
    nibble_tile_4,
    nibble_tile_8,
    quantise_for_bytes,
    quantise_for_nibbles,
)  # fmt: skip

# How weights are stored: float32, bfloat16, as `low_bits` has them, or bfloat16 as `matrix_units` does.
FLOATS, HALVES, BYTES, NIBBLES, MATRICES = range(5)
TILE_ROOM = 4 * (2 * LANES) ** 2  # bytes that a product with matrix units needs beside
_FLOAT = 4  # bytes
_BYTE_BLOCK, _NIBBLE_BLOCK = BLOCK_BYTES[8], BLOCK_BYTES[4]

_part = njit(nogil=True, error_model="numpy")  # compiled into, and kept with, what calls it


def _called(name):
    """Give a function made in another a name of its own.

    Compiled functions are kept on disk with all that they call, under names made of a function's own name and a number
    that only one process knows. Two kept in different runs may use one name for two functions of the same own name,
    and a process that loads both would call one of them for the other.
    """

    def rename(function):
        function.__qualname__ = f"{function.__qualname__}.{name}"
        return function

    return rename


def over_rows(name, four, three, two, one):
    """One block of 16 outputs for all rows, in tiles of four, and one tile for the rest."""

    @_part
    @_called(name)
    def over(x, x_step, rows, weights, size, out, out_step):
        """x, weights and out are addresses; steps and sizes count floats."""
        row = 0
        while row + 4 <= rows:
            four(x + row * x_step * _FLOAT, x_step, weights, size, out + row * out_step * _FLOAT, out_step)
            row += 4
        x, out = x + row * x_step * _FLOAT, out + row * out_step * _FLOAT
        if rows - row == 3:
            three(x, x_step, weights, size, out, out_step)
        elif rows - row == 2:
            two(x, x_step, weights, size, out, out_step)
        elif rows - row == 1:
            one(x, x_step, weights, size, out, out_step)

    return over


def over_turned_rows(name, sixteen, eight, rest):
    """The same where `turned` holds as many rows as possible turned, 16 by 16 and perhaps 8 more."""

    @_part
    @_called(name)
    def over(x, turned, rows, weights, size, out, out_step):
        row = 0
        while row + 16 <= rows:
            sixteen(turned + row * size * _FLOAT, weights, size, out + row * out_step * _FLOAT, out_step)
            row += 16
        if row + 8 <= rows:
            eight(turned + row * size * _FLOAT, weights, size, out + row * out_step * _FLOAT, out_step)
            row += 8
        rest(x + row * size * _FLOAT, size, rows - row, weights, size, out + row * out_step * _FLOAT, out_step)

    return over


tiles = over_rows("tiles", tile_4, tile_3, tile_2, tile_1)
tiles_onto = over_rows("tiles_onto", onto_4, onto_3, onto_2, onto_1)  # sums go on from what is there
half_tiles = over_rows("half_tiles", half_tile_4, half_tile_3, half_tile_2, half_tile_1)  # weights in bfloat16
turned_tiles = over_turned_rows("turned_tiles", turned_tile_16, turned_tile_8, tiles)
turned_half_tiles = over_turned_rows("turned_half_tiles", turned_half_tile_16, turned_half_tile_8, half_tiles)


def over_low_rows(name, group, eight, four, three, two, one):
    """The same for inputs of 8 bits."""

    @_part
    @_called(name)
    def over(x, rows, records, weights, size, out, out_step):
        groups = size // group
        step, row = groups * RECORD, 0
        while row + 4 <= rows:
            place = out + row * out_step * _FLOAT
            four(x + row * size, size, records + row * step * _FLOAT, step, weights, groups, place, out_step)
            row += 4
        x, records, out = x + row * size, records + row * step * _FLOAT, out + row * out_step * _FLOAT
        if rows - row == 3:
            three(x, size, records, step, weights, groups, out, out_step)
        elif rows - row == 2:
            two(x, size, records, step, weights, groups, out, out_step)
        elif rows - row == 1:
            one(x, size, records, step, weights, groups, out, out_step)

    @_part
    @_called(name)
    def wide(x, rows, records, weights, size, out, out_step):
        groups = size // group
        step, row = groups * RECORD, 0
        while row + 8 <= rows:
            place = out + row * out_step * _FLOAT
            eight(x + row * size, size, records + row * step * _FLOAT, step, weights, groups, place, out_step)
            row += 8
        x, records, out = x + row * size, records + row * step * _FLOAT, out + row * out_step * _FLOAT
        over(x, rows - row, records, weights, size, out, out_step)

    return wide if WIDE else over


byte_tiles = over_low_rows("byte_tiles", BYTE_GROUP, byte_tile_8, byte_tile_4, byte_tile_3, byte_tile_2, byte_tile_1)
nibble_tiles = over_low_rows(
    "nibble_tiles", NIBBLE_GROUP, nibble_tile_8, nibble_tile_4, nibble_tile_3, nibble_tile_2, nibble_tile_1
)


def over_row_tiles(one_one, one_two, two_one, two_two):
    """One block of 16 outputs, or two at once, for all rows, in tiles of 16 rows and two of those where possible."""

    @_part
    def over(x, rows, one, two, blocks, size, out, step, apart, scratch):
        """`two`, `apart`, `step`: see `tile_product`. Tiles that rows do not fill go to `scratch` first."""
        steps, row = (size + DEPTH - 1) // DEPTH, 0
        while row < rows:
            count = min(rows - row, 2 * LANES)
            own, place, own_step, own_apart = x + row * steps * 2 * DEPTH, out + row * step * _FLOAT, step, apart
            filled = count % LANES == 0
            if not filled:
                place, own_step, own_apart = scratch, 2 * LANES, LANES * _FLOAT
            if count > LANES:
                if blocks == 2:
                    two_two(own, one, two, steps, place, own_step, own_apart)
                else:
                    two_one(own, one, two, steps, place, own_step, own_apart)
            elif blocks == 2:
                one_two(own, one, two, steps, place, own_step, own_apart)
            else:
                one_one(own, one, two, steps, place, own_step, own_apart)
            if not filled:
                for i in range(count):
                    start, target = scratch + i * 2 * LANES * _FLOAT, out + (row + i) * step * _FLOAT
                    copy_lanes(start, target)
                    if blocks == 2:
                        copy_lanes(start + LANES * _FLOAT, target + apart)
            row += count

    return over


row_tiles = over_row_tiles(tile_product(1, 1), tile_product(1, 2), tile_product(2, 1), tile_product(2, 2))


@_part
def block_bytes(size, kind):
    """Bytes of the weights of 16 outputs."""
    if kind == MATRICES:
        return (size + DEPTH - 1) // DEPTH * TILE_BYTES
    if kind == BYTES:
        return size // BYTE_GROUP * _BYTE_BLOCK
    if kind == NIBBLES:
        return size // NIBBLE_GROUP * _NIBBLE_BLOCK
    return size * LANES * (2 if kind == HALVES else _FLOAT)


@_part
def make_ready(x, rows, size, kind, ready, records):
    """The inputs of a product as it takes them: as tiles, in 8 bits for weights in few, or turned where that helps."""
    if kind == MATRICES:
        steps = (size + DEPTH - 1) // DEPTH
        for row in range(rows):
            place = ready + (row // LANES * steps * LANES + row % LANES) * 2 * DEPTH
            round_row(x + row * size * _FLOAT, size // LANES, place)
            if size % DEPTH:
                fill_up(place + (steps - 1) * TILE_BYTES + DEPTH)
    elif kind == BYTES:
        quantise_for_bytes(x, rows * size // BYTE_GROUP, ready, records)
    elif kind == NIBBLES:
        quantise_for_nibbles(x, rows * size // NIBBLE_GROUP, ready, records)
    elif WIDE:
        row = 0
        while row + 16 <= rows:
            turn_16(x + row * size * _FLOAT, size, ready + row * size * _FLOAT)
            row += 16
        if row + 8 <= rows:
            turn_8(x + row * size * _FLOAT, size, ready + row * size * _FLOAT)


@_part
def product(x, ready, records, rows, weights, size, kind, out, out_step, first, last):
    """Columns 16 * first .. 16 * last of x times packed weights.

    `ready` and `records` are from `make_ready`; for matrix units `records` is TILE_ROOM bytes, and tiles have begun.
    """
    step = block_bytes(size, kind)
    if kind == MATRICES:
        for block in range(first, last, 2):
            own, place, blocks = weights + block * step, out + block * LANES * _FLOAT, min(2, last - block)
            row_tiles(ready, rows, own, own + step, blocks, size, place, out_step, LANES * _FLOAT, records)
        return
    for block in range(first, last):
        own, place = weights + block * step, out + block * LANES * _FLOAT
        if kind == BYTES:
            byte_tiles(ready, rows, records, own, size, place, out_step)
        elif kind == NIBBLES:
            nibble_tiles(ready, rows, records, own, size, place, out_step)
        elif WIDE and rows >= 8:
            if kind == FLOATS:
                turned_tiles(x, ready, rows, own, size, place, out_step)
            else:
                turned_half_tiles(x, ready, rows, own, size, place, out_step)
        elif kind == FLOATS:
            tiles(x, size, rows, own, size, place, out_step)
        else:
            half_tiles(x, size, rows, own, size, place, out_step)


@_part
def two_products(x, ready, records, rows, one, two, size, kind, out_one, out_two):
    """One block of 16 outputs of each of two weights, for outputs [rows, 16]. Arguments as of `product`."""
    if kind == MATRICES:
        row_tiles(ready, rows, one, two, 2, size, out_one, LANES, out_two - out_one, records)
    else:
        product(x, ready, records, rows, one, size, kind, out_one, LANES, 0, 1)
        product(x, ready, records, rows, two, size, kind, out_two, LANES, 0, 1)
