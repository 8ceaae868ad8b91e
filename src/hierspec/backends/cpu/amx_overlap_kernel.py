"""Softmax of a tile of rows beside the products of two others: matrix units work while vectors do.

A core computes ahead by some hundred instructions. One after the other, products and softmax each leave a unit idle; in
turns of one row they share the time of the longer.
"""

from __future__ import annotations

from typing import Any

from hierspec.backends.cpu.amx import TILE_BYTES, available
from hierspec.backends.cpu.amx import tile_registers as registers
from hierspec.backends.cpu.amx_softmax import LINE, SEGMENT, SoftmaxRow
from hierspec.backends.cpu.llvm import VectorWriter, i64
from hierspec.backends.cpu.routines import routine

OVERLAPPED_HEAD = 64  # the size of heads that this is for: four tiles of sums and two of queries
_SUMS, _STEPS = 4, 2
_SCORES, _ROWS, _COLUMNS = (4, 5), 6, 7  # tile registers; sums are 0 to 3
_VALUES = (_COLUMNS, *_SCORES)  # while no scores are in theirs: the next is loaded before the last one was multiplied
_CHUNKS = SEGMENT // 32


@routine(13, optimised=available)
def softmax_beside_products(
    w: VectorWriter,
    scores: Any, rows: Any, chunks: Any, factor: Any, result: Any,  # of one tile: see `softmax`
    probabilities: Any, values: Any, value_chunks: Any, sums: Any,  # of the tile before: see `weighted_sums`
    queries: Any, keys: Any, key_chunks: Any, key_scores: Any,  # of the tile after: see `scores`
) -> None:  # fmt: skip
    """A turn is two rows of softmax, a chunk of the sums, and a chunk of scores. Nothing is done for what has no rows
    or chunks. `key_scores` may be where `probabilities` are: a chunk has been used when its place is taken."""
    b, tiles = w.b, registers(w)
    softmax_row = SoftmaxRow(w, chunks, factor)

    def address(addresses: Any, index: Any) -> Any:
        return b.load(w.at(addresses, index, 8), typ=values.type, align=8)

    def row(number: Any) -> None:
        with b.if_then(b.icmp_signed("<", number, rows)):
            softmax_row.emit(w.plus(scores, number, LINE), w.plus(result, number, 4))

    def add_values(c: Any) -> None:
        tiles.load(_ROWS, w.plus(probabilities, c, 2 * TILE_BYTES))
        chunk = address(values, c)
        for j in range(_SUMS):
            column = _VALUES[j % len(_VALUES)]
            tiles.load(column, w.plus(chunk, j, TILE_BYTES))
            tiles.multiply(j, _ROWS, column)

    def score_keys(c: Any) -> None:
        chunk, to = address(keys, c), w.plus(key_scores, c, 2 * TILE_BYTES)
        for tile in _SCORES:
            tiles.zero(tile)
        for step in range(_STEPS):
            tiles.load(_ROWS, w.plus(queries, step, TILE_BYTES))
            for block, tile in enumerate(_SCORES):
                tiles.load(_COLUMNS, w.plus(chunk, block * _STEPS + step, TILE_BYTES))
                tiles.multiply(tile, _ROWS, _COLUMNS)
        for block, tile in enumerate(_SCORES):
            tiles.store(tile, w.plus(to, block, TILE_BYTES), i64(LINE))

    def turn(c: Any) -> None:
        with b.if_then(b.icmp_signed("<", c, value_chunks)):
            add_values(c)
        row(w.times(c, 2))
        with b.if_then(b.icmp_signed("<", c, key_chunks)):
            score_keys(c)
        row(w.plus(i64(1), c, 2))

    for j in range(_SUMS):
        tiles.zero(j)
    w.repeat(i64(_CHUNKS), turn)
    with b.if_then(b.icmp_signed(">", value_chunks, i64(0))):
        for j in range(_SUMS):
            tiles.store(j, w.plus(sums, j, LINE), i64(4 * OVERLAPPED_HEAD))
