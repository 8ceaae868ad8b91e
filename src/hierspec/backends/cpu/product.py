"""Rows times packed weights: one block of 16 outputs after the other, rows in tiles as large as the registers allow.

Whatever tile a row is in, each of its outputs is the same chain of steps, so its bits do not depend on the other rows.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from numba.extending import overload

from hierspec.backends.cpu.amx import DEPTH, TILE_BYTES, round_row, store_zeros, tile_product
from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.features import has_wide_registers
from hierspec.backends.cpu.kernels import (
    LANES,
    bfloat16_tile_1,
    bfloat16_tile_2,
    bfloat16_tile_3,
    bfloat16_tile_4,
    copy_lanes,
    onto_1,
    onto_2,
    onto_3,
    onto_4,
    tile_1,
    tile_2,
    tile_3,
    tile_4,
    transpose_8,
    transpose_16,
    transposed_bfloat16_tile_8,
    transposed_bfloat16_tile_16,
    transposed_tile_8,
    transposed_tile_16,
)
from hierspec.backends.cpu.quantised import (
    BLOCK_BYTES,
    INT4_GROUP,
    INT8_GROUP,
    WORDS_PER_GROUP,
    int4_tile_1,
    int4_tile_2,
    int4_tile_3,
    int4_tile_4,
    int4_tile_8,
    int8_tile_1,
    int8_tile_2,
    int8_tile_3,
    int8_tile_4,
    int8_tile_8,
    quantise_for_int4,
    quantise_for_int8,
)

# How weights are stored: as float32, as bfloat16, as in `quantised.py`, or as bfloat16 in the tiles of `amx.py`.
FLOAT32, BFLOAT16, INT8, INT4, BFLOAT16_AMX = range(5)
AMX_SCRATCH_BYTES = 4 * (2 * LANES) ** 2
_FLOAT = 4  # bytes
_INT8_BLOCK, _INT4_BLOCK = BLOCK_BYTES[8], BLOCK_BYTES[4]


def _named(name):
    """Give a function that is defined inside another function a name of its own.

    Compiled functions are cached on disk with all that they call, under symbols made of a function's name and a counter
    of the process. Two that were cached in different runs may use one symbol for two functions of the same name, and a
    process that loads both would call one of them for the other.
    """

    def rename(function):
        function.__qualname__ = f"{function.__qualname__}.{name}"
        return function

    return rename


def by_registers(name, wide, narrow):
    """`wide` on CPUs whose registers hold 16 floats, else `narrow`: asked when numba compiles a caller, not here."""

    def chosen(*arguments): ...

    @overload(chosen, jit_options={"nogil": True, "error_model": "numpy"})
    def choose(*arguments):
        function = wide if has_wide_registers() else narrow

        @_named(name)
        def call(*arguments):
            function(*arguments)

        return call

    return chosen


def over_rows(name, four, three, two, one):
    """One block of 16 outputs for all rows, in tiles of four, and one tile for the rest."""

    @part
    @_named(name)
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


def over_transposed_rows(name, sixteen, eight, rest):
    """The same where `transposed` holds as many rows as possible transposed, 16 by 16 and perhaps 8 more."""

    @part
    @_named(name)
    def over(x, transposed, rows, weights, size, out, out_step):
        row = 0
        while row + 16 <= rows:
            sixteen(transposed + row * size * _FLOAT, weights, size, out + row * out_step * _FLOAT, out_step)
            row += 16
        if row + 8 <= rows:
            eight(transposed + row * size * _FLOAT, weights, size, out + row * out_step * _FLOAT, out_step)
            row += 8
        rest(x + row * size * _FLOAT, size, rows - row, weights, size, out + row * out_step * _FLOAT, out_step)

    return over


def over_untransposed_rows(name, tiles):
    """`tiles` with the arguments of `over_transposed_rows`."""

    @part
    @_named(name)
    def over(x, transposed, rows, weights, size, out, out_step):
        tiles(x, size, rows, weights, size, out, out_step)

    return over


tiles = over_rows("tiles", tile_4, tile_3, tile_2, tile_1)
tiles_onto = over_rows("tiles_onto", onto_4, onto_3, onto_2, onto_1)  # sums go on from what is there
bfloat16_tiles = over_rows("bfloat16_tiles", bfloat16_tile_4, bfloat16_tile_3, bfloat16_tile_2, bfloat16_tile_1)
_float32_tiles = by_registers(
    "float32_tiles",
    wide=over_transposed_rows("transposed", transposed_tile_16, transposed_tile_8, tiles),
    narrow=over_untransposed_rows("untransposed", tiles),
)
_bfloat16_tiles = by_registers(
    "bfloat16_tiles",
    wide=over_transposed_rows(
        "transposed_bfloat16", transposed_bfloat16_tile_16, transposed_bfloat16_tile_8, bfloat16_tiles
    ),
    narrow=over_untransposed_rows("untransposed_bfloat16", bfloat16_tiles),
)


def over_quantised_rows(name, group, eight, four, three, two, one):
    """The same for inputs of 8 bits."""

    @part
    @_named(name)
    def by_four(x, rows, group_scales, weights, size, out, out_step):
        groups = size // group
        step, row = groups * WORDS_PER_GROUP, 0
        while row + 4 <= rows:
            target = out + row * out_step * _FLOAT
            four(x + row * size, size, group_scales + row * step * _FLOAT, step, weights, groups, target, out_step)
            row += 4
        x, group_scales, out = x + row * size, group_scales + row * step * _FLOAT, out + row * out_step * _FLOAT
        if rows - row == 3:
            three(x, size, group_scales, step, weights, groups, out, out_step)
        elif rows - row == 2:
            two(x, size, group_scales, step, weights, groups, out, out_step)
        elif rows - row == 1:
            one(x, size, group_scales, step, weights, groups, out, out_step)

    @part
    @_named(name)
    def by_eight(x, rows, group_scales, weights, size, out, out_step):
        groups = size // group
        step, row = groups * WORDS_PER_GROUP, 0
        while row + 8 <= rows:
            target = out + row * out_step * _FLOAT
            eight(x + row * size, size, group_scales + row * step * _FLOAT, step, weights, groups, target, out_step)
            row += 8
        x, group_scales, out = x + row * size, group_scales + row * step * _FLOAT, out + row * out_step * _FLOAT
        by_four(x, rows - row, group_scales, weights, size, out, out_step)

    return by_registers(name, wide=by_eight, narrow=by_four)


int8_tiles = over_quantised_rows(
    "int8_tiles", INT8_GROUP, int8_tile_8, int8_tile_4, int8_tile_3, int8_tile_2, int8_tile_1
)
int4_tiles = over_quantised_rows(
    "int4_tiles", INT4_GROUP, int4_tile_8, int4_tile_4, int4_tile_3, int4_tile_2, int4_tile_1
)


def over_amx_tiles(one_by_one, one_by_two, two_by_one, two_by_two):
    """One block of 16 outputs, or two at once, for all rows, in tiles of 16 rows and two of those where possible.

    The products are named by their tiles of rows and their blocks.
    """

    @part
    def over(x, rows, weights, second_weights, blocks, size, out, out_step, second_offset, scratch):
        """Arguments as in `ProductArguments`. Tiles that rows do not fill go to `scratch` first."""
        steps, row = (size + DEPTH - 1) // DEPTH, 0
        while row < rows:
            count = min(rows - row, 2 * LANES)
            inputs = x + row * steps * 2 * DEPTH
            target, step, offset = out + row * out_step * _FLOAT, out_step, second_offset
            filled = count % LANES == 0
            if not filled:
                target, step, offset = scratch, 2 * LANES, LANES * _FLOAT
            if count > LANES:
                if blocks == 2:
                    two_by_two(inputs, weights, second_weights, steps, target, step, offset)
                else:
                    two_by_one(inputs, weights, second_weights, steps, target, step, offset)
            elif blocks == 2:
                one_by_two(inputs, weights, second_weights, steps, target, step, offset)
            else:
                one_by_one(inputs, weights, second_weights, steps, target, step, offset)
            if not filled:
                for i in range(count):
                    source, to = scratch + i * 2 * LANES * _FLOAT, out + (row + i) * out_step * _FLOAT
                    copy_lanes(source, to)
                    if blocks == 2:
                        copy_lanes(source + LANES * _FLOAT, to + second_offset)
            row += count

    return over


amx_tiles = over_amx_tiles(tile_product(1, 1), tile_product(1, 2), tile_product(2, 1), tile_product(2, 2))


@part
def block_bytes(size, kind):
    """Bytes of the weights of 16 outputs."""
    if kind == BFLOAT16_AMX:
        return (size + DEPTH - 1) // DEPTH * TILE_BYTES
    if kind == INT8:
        return size // INT8_GROUP * _INT8_BLOCK
    if kind == INT4:
        return size // INT4_GROUP * _INT4_BLOCK
    return size * LANES * (2 if kind == BFLOAT16 else _FLOAT)


@part
def _transpose_many(x, rows, size, out):
    row = 0
    while row + 16 <= rows:
        transpose_16(x + row * size * _FLOAT, size, out + row * size * _FLOAT)
        row += 16
    if row + 8 <= rows:
        transpose_8(x + row * size * _FLOAT, size, out + row * size * _FLOAT)


@part
def _transpose_none(x, rows, size, out):
    pass


_transpose_inputs = by_registers("transpose_inputs", wide=_transpose_many, narrow=_transpose_none)


@part
def prepare_inputs(x, rows, size, kind, prepared, group_scales):
    """The inputs of a product as it takes them: as tiles, in 8 bits, or transposed where that helps."""
    if kind == BFLOAT16_AMX:
        steps = (size + DEPTH - 1) // DEPTH
        for row in range(rows):
            target = prepared + (row // LANES * steps * LANES + row % LANES) * 2 * DEPTH
            round_row(x + row * size * _FLOAT, size // LANES, target)
            if size % DEPTH:
                store_zeros(target + (steps - 1) * TILE_BYTES + DEPTH)
    elif kind == INT8:
        quantise_for_int8(x, rows * size // INT8_GROUP, prepared, group_scales)
    elif kind == INT4:
        quantise_for_int4(x, rows * size // INT4_GROUP, prepared, group_scales)
    else:
        _transpose_inputs(x, rows, size, prepared)


@part
def product(x, prepared, group_scales, rows, weights, size, kind, out, out_step, first, last):
    """Columns 16 * first .. 16 * last of x times packed weights.

    `prepared` and `group_scales` are from `prepare_inputs`; with AMX, `group_scales` is AMX_SCRATCH_BYTES of scratch
    memory, and `begin_tiles` was called.
    """
    step = block_bytes(size, kind)
    if kind == BFLOAT16_AMX:
        for block in range(first, last, 2):
            start, target, blocks = weights + block * step, out + block * LANES * _FLOAT, min(2, last - block)
            amx_tiles(prepared, rows, start, start + step, blocks, size, target, out_step, LANES * _FLOAT, group_scales)
        return
    for block in range(first, last):
        start, target = weights + block * step, out + block * LANES * _FLOAT
        if kind == INT8:
            int8_tiles(prepared, rows, group_scales, start, size, target, out_step)
        elif kind == INT4:
            int4_tiles(prepared, rows, group_scales, start, size, target, out_step)
        elif kind == FLOAT32:
            _float32_tiles(x, prepared, rows, start, size, target, out_step)
        else:
            _bfloat16_tiles(x, prepared, rows, start, size, target, out_step)


@part
def two_products(x, prepared, group_scales, rows, first, second, size, kind, first_out, second_out):
    """One block of 16 outputs of each of two weights, for outputs [rows, 16]. Arguments as of `product`."""
    if kind == BFLOAT16_AMX:
        amx_tiles(prepared, rows, first, second, 2, size, first_out, LANES, second_out - first_out, group_scales)
    else:
        product(x, prepared, group_scales, rows, first, size, kind, first_out, LANES, 0, 1)
        product(x, prepared, group_scales, rows, second, size, kind, second_out, LANES, 0, 1)
