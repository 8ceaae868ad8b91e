"""Attention's work of a pass in pieces: which rows see which block of keys.

Rows of one text that follow each other are a tile. Of each tile first come the blocks that its rows see together, then
those that rows with paths see alone. Compiled: between two passes the GPU waits for this.
"""

from __future__ import annotations

import numpy as np

from hierspec.backends.cuda.attention import FIELDS, FIRST_PAGE, KEYS
from hierspec.backends.cuda.memory import PAGE
from hierspec.stores.compiled import compiled_brief

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
