"""The KV cache in float32: the layout of its pages, and how keys and values get there.

Numbers that are multiplied with the same input are in 16 neighbouring lanes, as in packed weights: for every page,
layer and head, keys [PAGE / 16, head_size, 16] and values [head_size / 16, PAGE, 16].
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.kernels import copy_lanes, scatter
from hierspec.backends.cpu.llvm import LANES

PAGE = 64  # slots per page, the unit in which texts share prefixes; a multiple of 32
_FLOAT = 4  # bytes


@part
def keys_at(arena, page, layer, head, shape):
    """Address of a page's keys for a layer and head; its values follow directly."""
    _, kv_heads, head_size, _, layers = shape
    return arena + ((page * layers + layer) * kv_heads + head) * 2 * PAGE * head_size * _FLOAT


@part
def key_block(arena, table, block, layer, head, shape):
    """Address of the keys of 16 tokens of a text."""
    page, slot = table[block * LANES // PAGE], block * LANES % PAGE
    return keys_at(arena, page, layer, head, shape) + slot * shape[2] * _FLOAT


@part
def values_at(arena, page, layer, head, chunk, slot, shape):
    """Address of a page's values from a slot on, for 16 numbers of a head."""
    return keys_at(arena, page, layer, head, shape) + (PAGE * shape[2] + (chunk * PAGE + slot) * LANES) * _FLOAT


@part
def place(x, is_value, slot, layer, kv_head, shape, arena):
    """Stores a key or value, which is at the address `x`, in its slot."""
    head_size = shape[2]
    start, inside = keys_at(arena, slot // PAGE, layer, kv_head, shape), slot % PAGE
    if is_value:
        for chunk in range(head_size // LANES):
            value = values_at(arena, slot // PAGE, layer, kv_head, chunk, inside, shape)
            copy_lanes(x + chunk * LANES * _FLOAT, value)
    else:
        scatter(x, start + (inside // LANES * LANES * head_size + inside % LANES) * _FLOAT, head_size)


@part
def run_of_slots(paths, node, past, within):
    """How many nodes from `node` on, before `past`, have consecutive slots that do not cross a multiple of `within`."""
    slot, run = paths[node], 1
    most = min(past - node, within - slot % within)
    while run < most and paths[node + run] == slot + run:
        run += 1
    return run
