"""The numbers of a pass as kernels read them: its rows, and attention's work in pieces (which rows see which block of
keys).

Rows of one text that follow each other are a tile. Of each tile first come the blocks that its rows see together, then
those that rows with paths see alone. Compiled: between two passes the GPU waits for this.
"""

from __future__ import annotations

import numpy as np

from hierspec.backends.cuda.attention import FIELDS, FIRST_PAGE, KEYS
from hierspec.backends.cuda.memory import PAGE
from hierspec.compiled import compiled_brief

ROW_ARRAYS = 7  # positions, slots, drafted, limits, lengths, path starts, own pieces: as `Places` names them
_PAGES_OF_BLOCK = KEYS // PAGE


@compiled_brief
def pieces_of(  # type: ignore[no-untyped-def]
    positions, lengths, path_starts, text_starts, tables, together, window
):
    """[pieces, FIELDS], and the first own piece of each row: -1 without a path. `together`: tokens of a tile."""
    rows = len(positions)
    own = np.full(rows, -1, np.int64)
    most = 0
    for row in range(rows):  # as if each were a tile: more than enough
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
                piece[0], piece[1], piece[2] = first, last - first, block
                count += 1
            for row in range(first, last):
                if path_starts[row + 1] > path_starts[row]:
                    own[row] = count
                    for block in range(lengths[row] // KEYS, positions[row] // KEYS + 1):
                        piece = pieces[count]
                        piece[0], piece[1], piece[2], piece[3] = row, 1, block, 1
                        count += 1
            for number in range(begin, count):
                piece = pieces[number]
                piece[4], piece[5], piece[6], piece[7] = first, last - first, begin, first_block
                piece[8], piece[9], piece[10] = highest // KEYS, count - begin, tile
                for page in range(_PAGES_OF_BLOCK):  # where the text has ended: any page
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
    """Seven arrays of `width`, pieces times FIELDS, then the paths; the width and the number of pieces that the kernels
    run. Those are the smallest of `widths` and `sizes` that are enough; rows that only fill up write to `spare`."""
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
