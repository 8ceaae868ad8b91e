"""The numbers of a pass for the kernels: its rows, and pieces of attention work (which rows see which block of keys).

Consecutive rows of one text form a tile. A tile's pieces are first the blocks that its rows share, then those that rows
with paths see alone. This is compiled, because the GPU waits for it between passes.
"""

from __future__ import annotations

import numpy as np

from hierspec.backends.cuda.attention import FIELDS, FIRST_PAGE, KEYS, SEEN
from hierspec.backends.cuda.memory import PAGE
from hierspec.compiled import compiled_brief, compiled_part

ROW_ARRAYS = 7  # positions, slots, drafted, limits, lengths, path starts, own pieces, as in `Places`
_PAGES_OF_BLOCK = KEYS // PAGE


@compiled_brief
def pieces_of(  # type: ignore[no-untyped-def]
    positions, lengths, path_starts, text_starts, tables, together, window
):
    """[pieces, FIELDS], and the first own piece of each row, -1 without a path. `together`: tokens per tile."""
    rows = len(positions)
    own = np.full(rows, -1, np.int64)
    most = 0
    for row in range(rows):  # upper bound, as if each row were a tile
        most += positions[row] // KEYS + 2
    pieces = np.zeros((most, FIELDS), np.int32)
    count = tile = 0
    for text in range(len(text_starts) - 1):
        for first in range(text_starts[text], text_starts[text + 1], together):
            last = min(first + together, text_starts[text + 1])
            limit, lowest, highest = 0, positions[first], positions[first]
            for row in range(first, last):
                has_path = path_starts[row + 1] > path_starts[row]
                limit = max(limit, lengths[row] // KEYS * KEYS if has_path else lengths[row])
                lowest, highest = min(lowest, positions[row]), max(highest, positions[row])
            first_block = max(lowest - window + 1, 0) // KEYS if window else 0
            begin = count
            for block in range(first_block, (limit + KEYS - 1) // KEYS):
                piece = pieces[count]
                piece[0], piece[1], piece[2], piece[SEEN] = first, last - first, block, min(limit - block * KEYS, KEYS)
                count += 1
            for row in range(first, last):
                if path_starts[row + 1] > path_starts[row]:
                    own[row] = count
                    for block in range(lengths[row] // KEYS, positions[row] // KEYS + 1):
                        piece = pieces[count]
                        piece[0], piece[1], piece[2], piece[3] = row, 1, block, 1
                        piece[SEEN] = min(positions[row] + 1 - block * KEYS, KEYS)
                        count += 1
            for number in range(begin, count):
                piece = pieces[number]
                piece[4], piece[5], piece[6], piece[7] = first, last - first, begin, first_block
                piece[8], piece[9], piece[10] = highest // KEYS, count - begin, tile
                for page in range(_PAGES_OF_BLOCK):  # beyond the end of the text: any page
                    at = piece[2] * _PAGES_OF_BLOCK + page
                    piece[FIRST_PAGE + page] = tables[text, at] if at < tables.shape[1] else 0
            tile += 1
    return pieces[:count], own


@compiled_brief
def numbers_of(  # type: ignore[no-untyped-def]
    positions,
    slots,
    drafted,
    lengths,
    path_starts,
    paths,
    text_starts,
    tables,
    together,
    window,
    spare,
    widths,
    sizes,
):
    """The numbers of a pass: seven arrays of `width`, `pieces` times FIELDS, then the paths; and width and pieces.

    Width and number of pieces are the smallest sufficient ones of `widths` and `sizes`; padding rows write to `spare`.
    """
    pieces, own = pieces_of(positions, lengths, path_starts, text_starts, tables, together, window)
    rows, width, count = len(positions), 0, 0
    for size in widths:
        if size >= rows:
            width = size
            break
    for size in sizes:
        if size >= len(pieces):
            count = size
            break
    middle, end = ROW_ARRAYS * width, ROW_ARRAYS * width + count * FIELDS
    numbers = np.zeros(end + len(paths), np.int32)
    by_row = numbers[:middle].reshape(ROW_ARRAYS, width)
    by_row[1, rows:] = spare
    for row in range(rows):
        length, path = lengths[row], path_starts[row + 1] - path_starts[row]
        by_row[0, row], by_row[1, row] = positions[row], slots[row]
        by_row[2, row] = drafted[row] if len(drafted) else 0
        by_row[3, row] = length // KEYS * KEYS if path > 0 else length
        if rows > 1 or path > 0:
            by_row[4, row], by_row[5, row], by_row[6, row] = length, path_starts[row], own[row]
    numbers[middle : middle + pieces.size] = pieces.ravel()
    numbers[end:] = paths
    return numbers, width, count


CHAIN = 1 << 20  # codes of slots from here on: slots of the spare page, after its first; below: entries after the base


@compiled_part
def _slot(code, base, slots, spare):  # type: ignore[no-untyped-def]
    return slots[base + code] if code < CHAIN else spare + 1 + code - CHAIN


@compiled_brief
def numbers_of_round(  # type: ignore[no-untyped-def]
    out, at, base, slots, table, spare, together, window, widths, sizes, starts, offsets, codes, lengths, path_starts,
    path_codes, drafted,
):  # fmt: skip
    """Writes the numbers of several passes over one text, one after the other, from `at` on; returns where they end.

    Rows are given relative to the entry `base`: rows starts[i] .. starts[i + 1] are those of pass i.
    """
    tables = table.reshape(1, -1)
    for number in range(len(widths)):
        first, last = starts[number], starts[number + 1]
        rows, here = last - first, np.empty(last - first, np.int64)
        for row in range(rows):
            here[row] = _slot(codes[first + row], base, slots, spare)
        paths = np.empty(path_starts[last] - path_starts[first], np.int64)
        for place in range(len(paths)):
            paths[place] = _slot(path_codes[path_starts[first] + place], base, slots, spare)
        numbers, _, _ = numbers_of(
            base + offsets[first:last],
            here,
            drafted[first:last],
            base + lengths[first:last],
            path_starts[first : last + 1] - path_starts[first],
            paths,
            np.array([0, rows]),
            tables,
            together[number],
            window,
            spare,
            (widths[number],),
            (sizes[number],),
        )
        out[at : at + len(numbers)] = numbers
        at += len(numbers)
    return at
