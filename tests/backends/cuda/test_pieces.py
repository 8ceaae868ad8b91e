"""Pieces of attention's work, and rows that move: compiled and in kernels, beside the same in numpy and torch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.backends.cuda.attention import FIRST_PAGE, KEYS, SEEN
from hierspec.backends.cuda.memory import PAGE, CudaMemory
from hierspec.backends.cuda.moves import MOST_MOVES
from hierspec.backends.cuda.pieces import pieces_of

PAGES = KEYS // PAGE


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans(), st.sampled_from([0, 128, 1000]), st.integers(1, 16))
def test_every_row_sees_its_blocks_once(seed, texts, tree, window, together):
    rng = np.random.default_rng(seed)
    positions, lengths, path_starts, starts = list[int](), list[int](), [0], [0]
    for _ in range(texts):
        chain = int(rng.integers(1, 1500))
        for row in range(int(rng.integers(1, 12))):
            depth = int(rng.integers(1, row + 1)) if tree and row else 0
            positions.append(chain + depth - 1 if depth else chain + row)
            lengths.append(chain if depth else chain + row + 1)
            path_starts.append(path_starts[-1] + depth)
        starts.append(len(positions))
    tables = rng.integers(0, 500, (texts, 1600 // PAGE + 1))
    arrays = (np.array(each) for each in (positions, lengths, path_starts, starts))
    pieces, own = pieces_of(*arrays, tables, together, window)
    seen = {row: set() for row in range(len(positions))}
    paths_of = np.diff(path_starts)
    for first, count, block, alone, tile, height, begin, _, last, of_tile, _, *rest in pieces.tolist():
        text = int(np.searchsorted(starts, first, side="right")) - 1
        wanted = [
            int(tables[text, page]) if page < tables.shape[1] else 0
            for page in range(PAGES * block, PAGES * block + PAGES)
        ]
        assert rest[: len(pieces[0]) - FIRST_PAGE][:PAGES] == wanted
        assert last == max(positions[tile : tile + height]) // KEYS
        assert height <= together
        assert begin + of_tile <= len(pieces)
        # Exactly the keys that one of its rows sees are loaded. A shared piece shows whole blocks before a path.
        limits = [
            positions[row] + 1 if alone else lengths[row] // KEYS * KEYS if paths_of[row] else lengths[row]
            for row in range(first, first + count)
        ]
        assert rest[SEEN - FIRST_PAGE] == min(max(limits) - block * KEYS, KEYS) > 0
        for row in range(first, first + count):
            assert (block, alone) not in seen[row]
            seen[row].add((block, alone))
    for row, (position, length) in enumerate(zip(positions, lengths, strict=True)):
        has_path = path_starts[row + 1] > path_starts[row]
        together_blocks = {block for block, alone in seen[row] if not alone}
        alone_blocks = {block for block, alone in seen[row] if alone}
        needed = length // KEYS if has_path else -(-length // KEYS)
        first_seen = max(position - window + 1, 0) // KEYS if window else 0
        assert together_blocks >= set(range(first_seen, needed))
        assert alone_blocks == (set(range(length // KEYS, position // KEYS + 1)) if has_path else set())
        assert (own[row] >= 0) == has_path
        if has_path:
            assert pieces[own[row], 0] == row
            assert pieces[own[row], 2] == length // KEYS


@pytest.mark.parametrize("count", [1, 4, 5, 20, MOST_MOVES, MOST_MOVES + 30])
def test_rows_move_as_if_all_were_read_first(count, device):
    config = SimpleNamespace(layers=2, kv_heads=2, head_size=16, hidden=80)
    memory, rng = CudaMemory(config, device, (1, 2), 2_000_000), np.random.default_rng(count)
    parts = ((memory.keys, 2), (memory.values, 2), (memory.all_states, 1))
    expected = []
    to, source = rng.permutation(200)[:count], rng.permutation(200)[:count]  # some are both
    for part, slots in parts:
        part.copy_(torch.randn(part.shape))
        moved = part.cpu().clone()
        moved.index_copy_(slots, torch.tensor(to), moved.index_select(slots, torch.tensor(source)))
        expected.append(moved)
    memory.copy(to, source)
    for (part, slots), moved in zip(parts, expected, strict=True):
        assert torch.equal(part.cpu().narrow(slots, 0, memory.spare), moved.narrow(slots, 0, memory.spare))
