"""One block of 16 outputs for all rows of a product, in tiles as large as the registers allow.

In any tile, each output of a row is the same chain of steps, so its bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hierspec.backends.cpu.amx import DEPTH, tile_product
from hierspec.backends.cpu.features import dot_instruction, has_pair_products, has_wide_registers
from hierspec.backends.cpu.kernels import double_tiles, row_tiles, transpose_8, transpose_16, transposed_row_tiles
from hierspec.backends.cpu.llvm import LANES, VectorWriter, i64
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP
from hierspec.backends.cpu.routines import Routine, routine
from hierspec.backends.cpu.sdot_tiles import ROWS as ROWS_BY_SDOT

_FLOAT = 4  # bytes
_LEAST_BY_SDOT = 4 * ROWS_BY_SDOT  # with fewer rows, the work shared by all rows (`sdot_tiles.py`) does not pay off


def over_rows(of: dict[int, Routine], eights: bool = True) -> Routine:
    """One block of 16 outputs for all rows, in tiles of four rows, and one tile for the rest.

    With `eights`, tiles of eight come first on CPUs where four chains of sums do not fill the multipliers.
    """

    @routine(7)
    def over(w: VectorWriter, x: Any, x_step: Any, rows: Any, weights: Any, size: Any, out: Any, out_step: Any) -> None:
        """x, weights and out are addresses; steps and sizes count floats."""

        def tile(some: Routine, row: Any) -> None:
            sums = w.plus(out, row, out_step, _FLOAT)
            some(w, w.plus(x, row, x_step, _FLOAT), x_step, weights, size, sums, out_step)

        rest = {rows: of[rows] for rows in (3, 2, 1)}
        if eights and has_wide_registers():
            _by_eight(w, rows, lambda row: tile(of[8], row), lambda row: tile(of[4], row), rest, tile)
        else:
            _by_four(w, rows, lambda row: tile(of[4], row), rest, tile)

    return over


def _by_eight(  # type: ignore[no-untyped-def]
    w: VectorWriter, rows: Any, eight: Callable[[Any], None], four: Callable[[Any], None], rest, tile, done: Any = None
) -> None:
    """eight(first row) for every eight rows after `done`, then continues as `_by_four`."""
    done = i64(0) if done is None else done
    eights = w.b.sdiv(w.b.sub(rows, done), i64(8))
    w.repeat(eights, lambda number: eight(w.plus(done, number, 8)))
    _by_four(w, rows, four, rest, tile, w.plus(done, eights, 8))


def _by_four(
    w: VectorWriter,
    rows: Any,
    four: Callable[[Any], None],
    rest: dict[int, Routine],
    tile: Callable[..., None],
    done: Any = None,
) -> None:
    """four(first row) for every four rows after `done`, then tile(routine, first row) with the routine for the rest."""
    done = i64(0) if done is None else done
    fours = w.b.sdiv(w.b.sub(rows, done), i64(4))
    w.repeat(fours, lambda number: four(w.plus(done, number, 4)))
    row = w.plus(done, fours, 4)
    w.when_equal(w.b.sub(rows, row), {count: partial(tile, of, row) for count, of in rest.items()})


def over_transposed_rows(sixteen: Routine, eight: Routine, rest: Routine) -> Routine:
    """The same, if `transposed` holds as many rows as possible transposed: 16 at a time, and perhaps 8 more."""

    @routine(7)
    def over(w: VectorWriter, x: Any, transposed: Any, rows: Any, weights: Any, size: Any, out: Any, out_step: Any):  # type: ignore[no-untyped-def]
        def at(row: Any, start: Any) -> tuple[Any, Any]:
            return w.plus(start, row, size, _FLOAT), w.plus(out, row, out_step, _FLOAT)

        def tile(of: Routine, row: Any) -> None:
            inputs, target = at(row, transposed)
            of(w, inputs, weights, size, target, out_step)

        row = _over_wide(w, rows, lambda row: tile(sixteen, row), lambda row: tile(eight, row))
        inputs, target = at(row, x)
        rest(w, inputs, size, w.b.sub(rows, row), weights, size, target, out_step)

    return over


def _over_wide(w: VectorWriter, rows: Any, sixteen: Callable[[Any], None], eight: Callable[[Any], None]) -> Any:
    """sixteen(first row) for every 16 rows, eight(first row) for 8 more; returns the row after them."""
    sixteens = w.b.sdiv(rows, i64(16))
    w.repeat(sixteens, lambda number: sixteen(w.times(number, 16)))
    row = w.times(sixteens, 16)
    eights = w.b.sdiv(w.b.sub(rows, row), i64(8))
    w.repeat(eights, lambda _: eight(row))
    return w.plus(row, eights, 8)


def over_two_blocks(prefetching: dict[int, Routine], further: dict[int, Routine], one_block: Routine) -> Routine:
    """Two blocks of 16 outputs for all rows: up to 8 rows in tiles that prefetch what is `ahead`, then `further` ones.

    Where 16 lanes are several registers, few rows of one block fill the multipliers: there it is `one_block`, twice.
    """

    @routine(10)
    def over(  # type: ignore[no-untyped-def]
        w: VectorWriter, x, x_step, rows, weights, weights_offset, size, out, out_step, out_offset, ahead
    ) -> None:
        """x, weights and out are addresses; steps and sizes count floats, offsets and `ahead` bytes."""
        if not has_wide_registers():
            one_block(w, x, x_step, rows, weights, size, out, out_step)
            second, sums = w.b.add(weights, weights_offset), w.b.add(out, out_offset)
            one_block(w, x, x_step, rows, second, size, sums, out_step)
            return

        def tile(of: Routine, row: Any) -> None:
            inputs, sums = w.plus(x, row, x_step, _FLOAT), w.plus(out, row, out_step, _FLOAT)
            of(w, inputs, x_step, weights, weights_offset, size, sums, out_step, out_offset, ahead)

        def rest(tiles: dict[int, Routine]) -> dict[int, Routine]:
            return {rows: tiles[rows] for rows in (3, 2, 1)}

        with w.b.if_else(w.b.icmp_signed(">=", rows, i64(8))) as (many, few):
            with many:
                tile(prefetching[8], i64(0))
                eight, four = (partial(tile, further[rows]) for rows in (8, 4))
                _by_eight(w, rows, eight, four, rest(further), tile, i64(8))
            with few:
                _by_four(w, rows, partial(tile, prefetching[4]), rest(prefetching), tile)

    return over


# By how weights are stored and whether sums continue from `out`.
block_tiles = {
    (stored, onto): over_rows(of, eights=stored != "bfloat16")
    for stored, tiles in row_tiles.items()
    for onto, of in tiles.items()
}
two_block_tiles = {
    (stored, onto): over_two_blocks(of[True], of[False], block_tiles[stored, onto])
    for stored, tiles in double_tiles.items()
    for onto, of in tiles.items()
}
transposed_tiles = {
    stored: over_transposed_rows(of[16], of[8], block_tiles[stored, False])
    for stored, of in transposed_row_tiles.items()
}


def over_quantised_rows(group: int, tiles: dict[int, Routine], by_three: Routine | None = None) -> Routine:
    """The same for inputs of 8 bits: `tiles` of 8, 4, 3, 2 and 1 rows; `by_three` handles many rows by sdot."""

    @routine(7)
    def over(w: VectorWriter, x: Any, rows: Any, group_scales: Any, weights: Any, size: Any, out: Any, out_step: Any):  # type: ignore[no-untyped-def]
        groups = w.b.sdiv(size, i64(group))
        step = w.times(groups, WORDS_PER_GROUP)

        def tile(of: Routine, row: Any) -> None:
            scales, target = w.plus(group_scales, row, step, _FLOAT), w.plus(out, row, out_step, _FLOAT)
            of(w, w.plus(x, row, size), size, scales, step, weights, groups, target, out_step)

        rest = {rows: tiles[rows] for rows in (3, 2, 1)}
        if not has_wide_registers():
            done = i64(0)
            if by_three is not None and dot_instruction() == "sdot" and not has_pair_products():
                threes = w.times(w.b.sdiv(rows, i64(ROWS_BY_SDOT)), ROWS_BY_SDOT)
                done = w.b.select(w.b.icmp_signed(">=", rows, i64(_LEAST_BY_SDOT)), threes, done)
                with w.b.if_then(w.b.icmp_signed(">", done, i64(0))):
                    by_three(w, x, done, group_scales, weights, size, out, out_step)
            _by_four(w, rows, lambda row: tile(tiles[4], row), rest, tile, done)
            return
        _by_eight(w, rows, lambda row: tile(tiles[8], row), lambda row: tile(tiles[4], row), rest, tile)

    return over


def over_quantised_rows_of_two(group: int, tiles: dict[int, Routine], further_four: Routine, ahead: int) -> Routine:
    """The same for two blocks at once, with `tiles` of 4, 3, 2 and 1 rows, which prefetch weights `ahead`.

    The first tile of rows prefetches for one block and the second for the other, so that memory is read all the time.
    Further tiles read weights from the cache.
    """

    @routine(9)
    def over(  # type: ignore[no-untyped-def]
        w: VectorWriter, x, rows, group_scales, size, out_step, weights, out, second_weights, second_out
    ) -> None:
        groups = w.b.sdiv(size, i64(group))
        step = w.times(groups, WORDS_PER_GROUP)

        def tile(of: Routine, row: Any) -> None:
            scales, inputs = w.plus(group_scales, row, step, _FLOAT), w.plus(x, row, size)
            first, second = (w.plus(sums, row, out_step, _FLOAT) for sums in (out, second_out))
            begins, is_second = w.b.icmp_signed("==", row, i64(0)), w.b.icmp_signed("==", row, i64(4))
            for_second = w.b.or_(is_second, w.b.and_(begins, w.b.icmp_signed("<=", rows, i64(4))))
            blocks = [
                (weights, first, w.b.select(begins, i64(ahead), i64(0))),
                (second_weights, second, w.b.select(for_second, i64(ahead), i64(0))),
            ]
            of(w, inputs, size, scales, step, groups, out_step, *blocks[0], *blocks[1])

        fours = w.b.sdiv(rows, i64(4))
        prefetching = w.b.select(w.b.icmp_signed("<", fours, i64(2)), fours, i64(2))
        w.repeat(prefetching, lambda number: tile(tiles[4], w.times(number, 4)))
        rest = {rows: tiles[rows] for rows in (3, 2, 1)}
        _by_four(w, rows, lambda row: tile(further_four, row), rest, tile, w.times(prefetching, 4))

    return over


_tile_products = {(row_tiles, blocks): tile_product(row_tiles, blocks) for row_tiles in (1, 2) for blocks in (1, 2)}


@routine(10)
def amx_tiles(
    w: VectorWriter,
    x: Any,
    rows: Any,
    weights: Any,
    second_weights: Any,
    blocks: Any,
    size: Any,
    out: Any,
    out_step: Any,
    second_offset: Any,
    scratch: Any,
) -> None:
    """One block of 16 outputs, or two at once, for all rows, in tiles of 16 rows, two at a time if possible.

    Arguments as in `ProductArguments`. Partly filled tiles are stored in `scratch` first.
    """
    b, steps = w.b, amx_steps(w, size)

    def some_rows(number: Any) -> None:
        row = w.times(number, 2 * LANES)
        left = b.sub(rows, row)
        count = b.select(b.icmp_signed("<", left, i64(2 * LANES)), left, i64(2 * LANES))
        filled = b.icmp_signed("==", b.srem(count, i64(LANES)), i64(0))
        target = b.select(filled, w.plus(out, row, out_step, _FLOAT), scratch)
        step = b.select(filled, out_step, i64(2 * LANES))
        offset = b.select(filled, second_offset, i64(LANES * _FLOAT))
        row_tiles = b.sdiv(w.plus(count, LANES - 1), i64(LANES))
        given = w.plus(x, row, steps, 2 * DEPTH), weights, second_weights, steps, target, step, offset
        w.when_equal(
            w.plus(blocks, row_tiles, 2),
            {2 * high + wide: partial(of, w, *given) for (high, wide), of in _tile_products.items()},
        )

        def copy(i: Any) -> None:
            source, to = w.plus(scratch, i, 2 * LANES * _FLOAT), w.plus(out, b.add(row, i), out_step, _FLOAT)
            w.store(w.load(source, i64(0)), to, i64(0))
            with b.if_then(b.icmp_signed("==", blocks, i64(2))):
                w.store(w.load(source, i64(LANES)), b.add(to, second_offset), i64(0))

        with b.if_then(b.not_(filled)):
            w.repeat(count, copy)

    w.repeat(b.sdiv(w.plus(rows, 2 * LANES - 1), i64(2 * LANES)), some_rows)


def amx_steps(w: VectorWriter, size: Any) -> Any:
    return w.b.sdiv(w.plus(size, DEPTH - 1), i64(DEPTH))


@routine(4)
def transpose_rows(w: VectorWriter, x: Any, rows: Any, size: Any, out: Any) -> None:
    def transpose(of: Routine, row: Any) -> None:
        of(w, w.plus(x, row, size, _FLOAT), size, w.plus(out, row, size, _FLOAT))

    _over_wide(w, rows, lambda row: transpose(transpose_16, row), lambda row: transpose(transpose_8, row))
