"""What a staircase keeps when its text changes, and what its entries attend to.

These loops over entries are compiled, because the processor or GPU waits for them between passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hierspec.compiled import CompiledCalls, compiled_brief, compiled_part


@compiled_part
def _child(tokens, parents, same, used, parent, token):  # type: ignore[no-untyped-def]
    """The first entry from `same` on that holds this token after this parent; -1 where none does."""
    for entry in range(same, used):
        if parents[entry] == parent and tokens[entry] == token:
            return entry
    return -1


@compiled_brief
def follow(  # type: ignore[no-untyped-def]
    tokens, parents, positions, heights, same, used, context, node_tokens, node_parents
):
    """Write the context after its first `same` tokens, which are held, and then the nodes of a proposal.

    A token keeps its height if the same text is held among the entries up to `used`. Returns the entries whose rows
    must be copied from other entries, and those other entries.
    """
    length, count = len(context), len(node_tokens)
    wanted = length + count
    sources = np.full(wanted - same, -1, np.int64)  # held entry of wanted entry same, same + 1, ...; -1: none
    at = same - 1
    for entry in range(same, length):
        at = _child(tokens, parents, same, used, at, context[entry])
        if at < 0:
            break
        sources[entry - same] = at
    at = sources[length - same - 1] if length > same else same - 1
    for node in range(count):
        parent = node_parents[node]
        source = at if parent < 0 else sources[length - same + parent]
        if source >= 0:
            sources[length - same + node] = _child(tokens, parents, same, used, source, node_tokens[node])
    kept, moves = np.zeros(wanted - same, heights.dtype), 0
    for number in range(wanted - same):
        if sources[number] >= 0:
            kept[number] = heights[sources[number]]
            moves += sources[number] != same + number
    to, source_entries, moved = np.empty(moves, np.int64), np.empty(moves, np.int64), 0
    for number in range(wanted - same):
        if sources[number] >= 0 and sources[number] != same + number:
            to[moved], source_entries[moved] = same + number, sources[number]
            moved += 1
    for entry in range(same, length):
        tokens[entry], parents[entry], positions[entry] = context[entry], entry - 1, entry
    for node in range(count):
        entry, parent = length + node, node_parents[node]
        tokens[entry], parents[entry] = node_tokens[node], length + parent  # -1 is the context's last entry
        positions[entry] = length if parent < 0 else positions[length + parent] + 1
    for number in range(wanted - same):
        heights[same + number] = kept[number]
    return to, source_entries


@compiled_brief
def seen_by(entries, chain, positions, parents, slots):  # type: ignore[no-untyped-def]
    """What each of these entries attends to, as `Staircase.seen` says it."""
    rows, size = len(entries), 0
    lengths, starts = np.empty(rows, np.int64), np.zeros(rows + 1, np.int64)
    for row in range(rows):
        entry = entries[row]
        lengths[row] = entry + 1
        if positions[entry] != entry and entry >= chain:
            lengths[row] = chain
            size += positions[entry] - chain + 1
        starts[row + 1] = size
    paths = np.empty(size, np.int64)
    for row in range(rows):
        entry = entries[row]
        for place in range(starts[row + 1] - 1, starts[row] - 1, -1):
            paths[place] = slots[entry]
            entry = parents[entry]
    return lengths, starts, paths


def _typical_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    tokens, numbers, one = np.zeros(2, np.int32), np.zeros(2, np.int64), np.zeros(1, np.int64)
    return [
        (follow, (tokens, numbers, numbers, tokens, 1, 1, tokens[:1], one, one - 1)),
        (seen_by, (one, 0, numbers, numbers, numbers)),
    ]


ALIGNING = CompiledCalls(f"{__name__}:ALIGNING", 2.0, _typical_calls)  # what every draft needs
