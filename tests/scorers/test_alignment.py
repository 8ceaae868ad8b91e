"""What a staircase keeps when its text changes: compiled loops beside the same with dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.scorers.alignment import ALIGNING, follow, seen_by


def tree(rng, nodes):
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(nodes)]
    return rng.integers(0, 3, nodes).tolist(), parents


def held(chain, node_tokens, node_parents, room):
    """Arrays of a staircase that holds a chain and nodes after it, all at some height."""
    tokens, parents, positions, heights = (np.zeros(room, kind) for kind in (np.int32, np.int64, np.int64, np.int32))
    size = len(chain)
    for entry, token in enumerate(chain):
        tokens[entry], parents[entry], positions[entry], heights[entry] = token, entry - 1, entry, 9
    for node, (token, parent) in enumerate(zip(node_tokens, node_parents, strict=True)):
        entry = size + node
        tokens[entry], parents[entry], heights[entry] = token, size + parent, 1 + node % 4
        positions[entry] = size if parent < 0 else positions[size + parent] + 1
    return tokens, parents, positions, heights


def kept_entries(arrays, same, used, context, node_tokens, node_parents):
    """The held entry of each wanted one from `same` on; -1 where none holds the same text."""
    tokens, parents, _, _ = arrays
    children = {(int(parents[entry]), int(tokens[entry])): entry for entry in reversed(range(same, used))}
    sources, at = [], same - 1
    for token in context[same:]:
        at = children.get((at, int(token)), -2) if at != -2 else -2
        sources.append(max(at, -1))
    last = sources[-1] if sources else same - 1
    nodes = {-1: last}
    for node, (token, parent) in enumerate(zip(node_tokens, node_parents, strict=True)):
        nodes[node] = children.get((nodes[parent], token), -1) if nodes[parent] >= 0 else -1
        sources.append(nodes[node])
    return sources


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_held_of_the_same_text_is_kept(seed):
    rng = np.random.default_rng(seed)
    chain = rng.integers(0, 3, int(rng.integers(1, 6))).tolist()
    old = tree(rng, int(rng.integers(0, 8)))
    arrays = held(chain, *old, room=40)
    used = len(chain) + len(old[0])
    same = int(rng.integers(0, len(chain) + 1))
    context = np.array([*chain[:same], *rng.integers(0, 3, int(rng.integers(0, 5)))], np.int32)
    new = tree(rng, int(rng.integers(1, 8)))
    if not len(context):
        return
    sources = kept_entries(arrays, same, used, context, *new)
    heights = [int(arrays[3][source]) if source >= 0 else 0 for source in sources]
    to, moved = follow(*arrays, same, used, context, *(np.array(numbers, np.int64) for numbers in new))
    assert list(zip(to.tolist(), moved.tolist(), strict=True)) == [
        (entry, source) for entry, source in enumerate(sources, same) if 0 <= source != entry
    ]
    size, wanted = len(context), len(context) + len(new[0])
    right = held(context.tolist(), *new, room=40)
    for number in range(3):
        assert arrays[number][same:wanted].tolist() == right[number][same:wanted].tolist()
    assert arrays[3][same:wanted].tolist() == heights
    entries = np.arange(max(size - 1, 0), wanted)
    slots = rng.permutation(40).astype(np.int64)
    lengths, starts, paths = seen_by(entries, size, arrays[2], arrays[1], slots)
    for row, entry in enumerate(entries.tolist()):
        path = []
        if arrays[2][entry] != entry:
            while entry >= size:
                path.append(int(slots[entry]))
                entry = int(arrays[1][entry])
        assert paths[starts[row] : starts[row + 1]].tolist() == path[::-1]
        assert lengths[row] == (size if path else entries[row] + 1)


def test_it_is_compiled_before_a_request_waits():
    ALIGNING.load()
    assert ALIGNING.cached()
