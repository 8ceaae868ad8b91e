"""The KV cache in bfloat16 tiles for Intel AMX: its layout, and how keys and values get there.

For every page, layer and head: keys [PAGE / 16, head_size / 32, 16 pairs, 16 keys, 2], where head_size is padded to a
multiple of 32 with zeros, and values [PAGE / 32, head_size / 16, 16 pairs of slots, 16, 2]. A pair is slots i and
i + 16 of a chunk of 32, so the probabilities of two blocks of 16 combine lane by lane into a tile's row
(`amx_softmax.py`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from hierspec.backends.cpu.amx import DEPTH, TILE_BYTES, steps
from hierspec.backends.cpu.amx_attention_kernels import CHUNK, AttentionCode
from hierspec.backends.cpu.amx_softmax import LINE
from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.kernels import store_integer, zero_lanes
from hierspec.backends.cpu.kv_pages import PAGE
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.routines import call_routine

# numba takes constants, not enumerations.
_PLACE_KEY, _PLACE_VALUE = int(AttentionCode.PLACE_KEY), int(AttentionCode.PLACE_VALUE)
_COPY_KEY, _COPY_VALUE = int(AttentionCode.COPY_KEY), int(AttentionCode.COPY_VALUE)


def key_bytes(head_size: int) -> int:
    """Bytes of the keys of one page, layer and head."""
    return PAGE // LANES * steps(head_size) * TILE_BYTES


def value_bytes(head_size: int) -> int:
    return PAGE // CHUNK * (head_size // LANES) * TILE_BYTES


@part
def keys_at(arena, page, layer, head, shape):
    """Address of a page's keys for a layer and head; its values follow directly."""
    _, kv_heads, head_size, _, layers, _ = shape
    size = keys_size(head_size) + PAGE * head_size * 2
    return arena + ((page * layers + layer) * kv_heads + head) * size


@part
def keys_size(head_size):
    return PAGE // LANES * ((head_size + DEPTH - 1) // DEPTH) * TILE_BYTES


@part
def key_column(slot, head_size):
    """Offset of a key within the keys of its page."""
    depth = (head_size + DEPTH - 1) // DEPTH
    return slot // LANES * depth * TILE_BYTES + slot % LANES * 4


@part
def value_pair(slot, head_size):
    """Offset of a pair of values within the values of its page."""
    return slot // CHUNK * (head_size // LANES) * TILE_BYTES + slot % LANES * LINE


@part
def _half(slot):
    """Which half of its pair a value is: 0 or 1."""
    return slot % CHUNK // LANES


@part
def place_rounded(x, is_value, slot, layer, kv_head, shape, arena, code):
    """Stores a key or value, which is at the address `x`, in its slot, rounded to bfloat16."""
    head_size = shape[2]
    start, inside, groups = keys_at(arena, slot // PAGE, layer, kv_head, shape), slot % PAGE, head_size // LANES
    if is_value:
        value = start + keys_size(head_size) + value_pair(inside, head_size) + _half(inside) * 2
        call_routine(code[_PLACE_VALUE], (x, groups, value))
    else:
        call_routine(code[_PLACE_KEY], (x, groups, start + key_column(inside, head_size)))


@part
def _slot_at(position, row, table, ends, path_starts, paths):
    if position < ends[row]:
        return table[position // PAGE] * PAGE + position % PAGE
    return paths[path_starts[row] + position - ends[row]]


@part
def gather_keys(
    start, first, last, row, layer, head, shape, arena, table, ends, path_starts, paths, keys, listed, code
):  # fmt: skip
    """Copies the keys of positions first .. last, as the row sees them, to `keys`, whose chunks begin at `start`.

    Stores the addresses of the chunks in `listed`. The unused end of the last chunk may hold anything.
    """
    head_size = shape[2]
    depth = (head_size + DEPTH - 1) // DEPTH
    for position in range(first, last):
        slot = _slot_at(position, row, table, ends, path_starts, paths)
        source = keys_at(arena, slot // PAGE, layer, head, shape) + key_column(slot % PAGE, head_size)
        call_routine(code[_COPY_KEY], (source, keys + key_column(position - start, head_size), depth * LANES))
    for chunk in range((last - start + CHUNK - 1) // CHUNK):
        store_integer(listed + 8 * chunk, keys + 2 * chunk * depth * TILE_BYTES)


@part
def gather_values(start, first, last, row, layer, head, shape, arena, table, ends, path_starts, paths, values, code):
    """The same for values; `clear_values` must have been called before."""
    head_size = shape[2]
    for position in range(first, last):
        slot, to = _slot_at(position, row, table, ends, path_starts, paths), position - start
        source = keys_at(arena, slot // PAGE, layer, head, shape) + keys_size(head_size)
        source += value_pair(slot % PAGE, head_size)
        target = values + value_pair(to, head_size)
        call_routine(code[_COPY_VALUE], (source, _half(slot), target, _half(to), head_size // LANES))


@part
def clear_values(chunks, head_size, values, listed):
    """Zeroes the chunks that values will be gathered into, since NaN times zero is NaN; addresses to `listed`."""
    size = head_size // LANES * TILE_BYTES
    for line in range(chunks * size // LINE):
        zero_lanes(values + line * LINE)
    for chunk in range(chunks):
        store_integer(listed + 8 * chunk, values + chunk * size)
