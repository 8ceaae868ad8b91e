"""The KV cache in float32 or float16: the layout of its pages, and how keys and values get there.

Numbers that are multiplied with the same input are in 16 neighbouring lanes, as in packed weights: for every page,
layer and head, keys [PAGE / 16, head_size, 16] and values [head_size / 16, PAGE, 16]. `shape` ends with the bytes of
a number.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from hierspec.backends.cpu.attention_kernels import VectorCode
from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.routines import call_routine

PAGE = 64  # slots per page, the unit in which texts share prefixes; a multiple of 32

# numba takes constants, not enumerations.
_PLACE_KEY, _PLACE_VALUE = int(VectorCode.PLACE_KEY), int(VectorCode.PLACE_VALUE)


@part
def keys_at(arena, page, layer, head, shape):
    """Address of a page's keys for a layer and head; its values follow directly."""
    _, kv_heads, head_size, _, layers, size = shape
    return arena + ((page * layers + layer) * kv_heads + head) * 2 * PAGE * head_size * size


@part
def key_block(arena, table, block, layer, head, shape):
    """Address of the keys of 16 tokens of a text."""
    page, slot = table[block * LANES // PAGE], block * LANES % PAGE
    return keys_at(arena, page, layer, head, shape) + slot * shape[2] * shape[5]


@part
def key_at(arena, page, layer, head, slot, shape):
    """Address of one key: its numbers are in one lane of a block."""
    first = slot // LANES * LANES * shape[2] + slot % LANES
    return keys_at(arena, page, layer, head, shape) + first * shape[5]


@part
def values_at(arena, page, layer, head, chunk, slot, shape):
    """Address of a page's values from a slot on, for 16 numbers of a head."""
    return keys_at(arena, page, layer, head, shape) + (PAGE * shape[2] + (chunk * PAGE + slot) * LANES) * shape[5]


@part
def place(x, is_value, slot, layer, head, shape, arena, code):
    """Stores a key or value, which is at the address `x`, in its slot."""
    page, inside, groups = slot // PAGE, slot % PAGE, shape[2] // LANES
    if is_value:
        value = values_at(arena, page, layer, head, 0, inside, shape)
        call_routine(code[_PLACE_VALUE], (x, groups, value, PAGE * LANES * shape[5]))
    else:
        call_routine(code[_PLACE_KEY], (x, groups, key_at(arena, page, layer, head, inside, shape)))


@part
def run_of_slots(paths, node, past, within):
    """How many nodes from `node` on, before `past`, have consecutive slots that do not cross a multiple of `within`."""
    slot, run = paths[node], 1
    most = min(past - node, within - slot % within)
    while run < most and paths[node + run] == slot + run:
        run += 1
    return run
