"""A batch for the kernels: rows and pieces of attention work, in one array that is copied at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hierspec.backends.base import Batch
from hierspec.backends.cuda.attention import FIELDS, FIRST_PAGE, KEYS, ROWS, SEEN, WIDE_FROM, WIDE_ROWS
from hierspec.backends.cuda.memory import PAGE
from hierspec.backends.cuda.pieces import ROW_ARRAYS, numbers_of

MOST_ROWS = 256  # per pass
MOST_PIECES = 2048  # pieces of attention work per pass
MOST_PATHS = 64 * MOST_ROWS  # slots of all paths per pass
MOST_NUMBERS = ROW_ARRAYS * MOST_ROWS + MOST_PIECES * FIELDS + MOST_PATHS  # numbers per pass
_PAGES_OF_BLOCK = KEYS // PAGE
# Few sizes: before a graph is fast, it is launched kernel by kernel once and recorded once, and padding rows or pieces
# take almost no time, because products multiply 16 rows at once.
_WIDTHS = (1, 16, 32, 64, 128, MOST_ROWS)
_PIECES = (4, 16, 64, 256, 1024, MOST_PIECES)  # for one row
_PIECES_OF_MORE = _PIECES[2:]
_MOST_AS_TREE = 64  # up to this many rows, passes with and without trees share a graph: drafts alternate


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """Rows of a pass, and their pieces of attention work."""

    rows: int
    width: int  # rows that the kernels run, with padding
    pieces: int  # pieces that the kernels run, with padding
    tree: bool  # whether rows may have paths
    tile: int  # rows per tile
    numbers: np.ndarray  # int32: seven arrays of `width`, `pieces` times FIELDS, then the paths


def bucket(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest sufficient size."""
    return next(each for each in sizes if each >= size)


def in_passes(batch: Batch, group: int) -> Iterator[tuple[slice, Batch]]:
    """Splits a batch into passes that fit, in order: later rows see what earlier ones have written."""
    rows, most = len(batch.positions), _rows_of_a_pass(batch, group)
    if rows <= most:
        yield slice(0, rows), batch
        return
    for first in range(0, rows, most):
        yield slice(first, min(first + most, rows)), _cut(batch, first, min(first + most, rows))


def fits(batch: Batch, group: int) -> bool:
    """Whether the whole batch fits in one pass."""
    return len(batch.positions) <= _rows_of_a_pass(batch, group)


def _rows_of_a_pass(batch: Batch, group: int) -> int:
    """Rows that fit even if each is its own tile, or has two blocks of its own."""
    longest = int(batch.positions.max()) + 1 if len(batch.positions) else 0
    blocks = -(-longest // KEYS)
    most = min(MOST_ROWS, max(MOST_PIECES // (blocks + 2), 1))
    if not len(batch.paths) and len(batch.tables) == 1:
        most = min(MOST_ROWS, max((MOST_PIECES // max(blocks, 1) - 1) * (ROWS // group), 1))
    if len(batch.paths) > MOST_PATHS:
        most = min(most, max(MOST_PATHS // int(np.diff(batch.path_starts).max()), 1))
    return most


def _cut(batch: Batch, first: int, last: int) -> Batch:
    """The batch of rows first .. last."""
    texts = [
        text
        for text in range(len(batch.tables))
        if batch.text_starts[text] < last and batch.text_starts[text + 1] > first
    ]
    starts = np.clip(batch.text_starts[[*texts, texts[-1] + 1]], first, last) - first
    paths = slice(batch.path_starts[first], batch.path_starts[last])
    return Batch(
        positions=batch.positions[first:last],
        slots=batch.slots[first:last],
        text_starts=starts,
        tables=batch.tables[texts],
        lengths=batch.lengths[first:last],
        path_starts=batch.path_starts[first : last + 1] - batch.path_starts[first],
        paths=batch.paths[paths],
        drafted=batch.drafted[first:last],
    )


def width_for(rows: int) -> int:
    """Rows that kernels run for a pass over so many."""
    return bucket(rows, _WIDTHS)


def pieces_for(rows: int, pieces: int) -> int:
    """Pieces that kernels run for a pass over so many rows with so many pieces."""
    return bucket(pieces, _PIECES if rows == 1 else _PIECES_OF_MORE)


def rows_of_a_tile(rows: int, highest: int) -> int:
    """Rows per tile in a pass with this many rows of query heads, up to this position."""
    return WIDE_ROWS if rows >= 2 * WIDE_ROWS and highest >= WIDE_FROM else ROWS


def work_of(batch: Batch, group: int, window: int, spare: int) -> Work:
    """The work of a batch of at most MOST_ROWS rows.

    `group`: query heads per KV head; `window`: the widest window of the layers, 0 if a layer sees everything; `spare`:
    a slot for padding rows.
    """
    rows = len(batch.positions)
    tile = rows_of_a_tile(rows * group, int(batch.positions.max()))
    numbers, width, pieces = numbers_of(
        batch.positions,
        batch.slots,
        batch.drafted,
        batch.lengths,
        batch.path_starts,
        batch.paths,
        batch.text_starts,
        batch.tables,
        tile // group,
        window,
        spare,
        _WIDTHS,
        _PIECES if rows == 1 else _PIECES_OF_MORE,
    )
    return Work(rows, width, pieces, len(batch.paths) > 0 or 1 < rows <= _MOST_AS_TREE, tile, numbers)


@dataclass(frozen=True, eq=False, slots=True)
class Steps:
    """Passes over one row each: a text that grows by one token per pass."""

    pieces: int  # per pass
    numbers: np.ndarray  # [steps, numbers of a `Work` of one row]


def steps_of(position: int, slots: np.ndarray, table: np.ndarray, windows: tuple[int, ...]) -> Steps:
    """The next tokens of a text, from this position on, one for each slot."""
    steps = len(slots)
    positions = np.arange(position, position + steps)
    lasts = positions // KEYS
    first = max(position - max(windows) + 1, 0) // KEYS if all(windows) else 0
    blocks = int(lasts[-1]) + 1 - first
    pieces = bucket(blocks, _PIECES)
    numbers = np.zeros((steps, ROW_ARRAYS + pieces * FIELDS), np.int32)
    numbers[:, 0], numbers[:, 1], numbers[:, 3] = positions, slots, positions + 1
    work = numbers[:, ROW_ARRAYS:].reshape(steps, pieces, FIELDS)[:, :blocks]
    one = np.zeros((blocks, FIELDS), np.int32)
    one[:, 1] = one[:, 5] = 1
    one[:, 2], one[:, 7] = np.arange(first, first + blocks), first
    _put_pages(one, table, first)
    work[:] = one
    work[:, :, 8], work[:, :, 9] = lasts[:, None], lasts[:, None] + 1 - first
    work[:, :, SEEN] = np.minimum(positions[:, None] + 1 - KEYS * one[None, :, 2], KEYS)
    if lasts[0] != lasts[-1]:  # blocks that the first steps do not see yet are no work
        work[one[None, :, 2] > lasts[:, None]] = 0
    return Steps(pieces, numbers)


def _put_pages(pieces: np.ndarray, table: np.ndarray, first: int) -> None:
    """Sets the pages of blocks of a text from block `first` on; beyond the table, page 0."""
    pages = np.zeros(len(pieces) * _PAGES_OF_BLOCK, np.int64)
    here = table[first * _PAGES_OF_BLOCK : first * _PAGES_OF_BLOCK + len(pages)]
    pages[: len(here)] = here
    pieces[:, FIRST_PAGE : FIRST_PAGE + _PAGES_OF_BLOCK] = pages.reshape(-1, _PAGES_OF_BLOCK)
