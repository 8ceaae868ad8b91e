"""Products fused with the work after them, in one kernel each.

Queries, keys and values get rotary embedding and go to the KV cache; gate and up get the activation.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from hierspec.backends.cuda.launching import (
    arrives_last,
    options,
    ordered_sum,
    prefetch_rows,
    release_next,
    wait_for_last,
)
from hierspec.backends.cuda.norms import Norm, norm_scales
from hierspec.backends.cuda.products import (
    Weight,
    keep_part,
    multiplied_twice,
    range_of_split,
    sum_of_parts,
)
from hierspec.backends.cuda.tiling import tokens_together


@triton.jit(do_not_specialize_on_alignment=["index"])
def gather_kernel(index, table, out, H, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """out[row] = table[index[row]]; -1 is no token, and nothing reads its result."""
    wait_for_last(OVERLAP)
    row, h = tl.program_id(0), tl.arange(0, WIDTH)
    line = tl.maximum(tl.load(index + row), 0).to(tl.int64)
    numbers = tl.load(table + line * H + h, mask=h < H, other=0.0)
    tl.store(out + row.to(tl.int64) * H + h, numbers.to(tl.float32), mask=h < H)


def gather_rows(index: Tensor, table: Tensor, out: Tensor, rows: int) -> None:
    """Gathers `rows` rows of a table [any, hidden], as float32."""
    size = table.shape[-1]
    width = triton.next_power_of_2(size)
    gather_kernel[(rows,)](index, table, out, size, width, **options(8 if width > 1024 else 4, 1, size))


@triton.jit
def finish_gated(
    gate, up, squares, scales, out, outputs, tokens, N, K, M, eps,
    NORM: tl.constexpr, SCALED: tl.constexpr, TOK: tl.constexpr,
):  # fmt: skip
    if NORM:
        scale = norm_scales(squares, tokens, M, K, eps, TOK)[None, :]
        gate, up = gate * scale, up * scale
    if SCALED:
        gate = gate * tl.load(scales + outputs, mask=outputs < N, other=0.0)[:, None]
        up = up * tl.load(scales + N + outputs, mask=outputs < N, other=0.0)[:, None]
    inside = (outputs < N)[:, None] & (tokens < M)[None, :]
    at = out + tokens[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def gated_kernel(
    x, squares, w, scales, out, parts, counters, N, K, M, eps,
    SCALED: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, TOK: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[token, N] = silu(gate) * up; w is [2 N, K], gate first."""
    block, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs = block * BN + tl.arange(0, BN)
    tokens = group * TOK + tl.arange(0, TOK)
    first, last = range_of_split(split, K, SPLITS, BK)
    rows = tl.minimum(outputs, N - 1)
    prefetch_rows(w, rows, first, K, OVERLAP)
    prefetch_rows(w, rows + N, first, K, OVERLAP)
    wait_for_last(OVERLAP)
    gate, up = multiplied_twice(w, rows, rows + N, x, tokens < M, tokens, first, last, K, BN, TOK, BK, EVEN)
    release_next(OVERLAP)
    if SPLITS == 1:
        finish_gated(gate, up, squares, scales, out, outputs, tokens, N, K, M, eps, NORM, SCALED, TOK)
    else:
        tile, tiles = group * tl.num_programs(0) + block, tl.num_programs(0) * tl.num_programs(2)
        keep_part(parts, 2 * (split * tiles + tile), gate, BN, TOK)
        keep_part(parts, 2 * (split * tiles + tile) + 1, up, BN, TOK)
        if arrives_last(counters + tile, SPLITS):
            gate = sum_of_parts(parts, 2 * tile, 2 * tiles, BN, TOK, SPLITS)
            up = sum_of_parts(parts, 2 * tile + 1, 2 * tiles, BN, TOK, SPLITS)
            finish_gated(gate, up, squares, scales, out, outputs, tokens, N, K, M, eps, NORM, SCALED, TOK)


def gated(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    rows: int,
    splitting: tuple[Tensor, Tensor],
    norm: Norm | None = None,
    after_norm: bool = False,
) -> None:
    """Arguments as for `product`."""
    tiles, (both, inputs), together = weight.tiles, weight.matrix.shape, tokens_together(rows)
    squares, eps = norm or (out, 0.0)
    outputs = both // 2
    grid = (triton.cdiv(outputs, tiles.outputs), tiles.splits, triton.cdiv(rows, together))
    gated_kernel[grid](
        x, squares, weight.matrix, weight.scales, out, *splitting, outputs, inputs, rows, eps,
        weight.scales.numel() > 0, norm is not None, inputs % tiles.inputs == 0, tiles.splits, together,
        tiles.outputs, tiles.inputs, **options(tiles.warps, tiles.stages, inputs, after_norm),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Heads:
    """What happens to queries, keys and values of one layer after the product."""

    heads: int
    kv_heads: int
    head_size: int
    rotary: bool
    eps: float
    bias: Tensor | None  # [outputs] float32
    norms: tuple[Tensor, Tensor] | None  # [head_size] float32: of queries, and of keys


@triton.jit
def numbers_only(x, drafted):
    """Keys and values with zeros instead of NaN and infinity, for drafted tokens.

    Rows that must not see a drafted token give it weight zero, and zero times NaN is NaN. Its own row stays NaN,
    because the layers add to its NaN state.
    """
    return tl.where((drafted != 0)[None, :] & ((x != x) | (tl.abs(x) == float("inf"))), 0.0, x)


@triton.jit
def finish_heads(
    a, b, outputs, squares, bias, scales, q_norm, k_norm, cos, sin, q, keys, values, positions, slots, drafted,
    head, d, tokens, K, M, SLOTS, eps, head_eps,
    QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LOG_P: tl.constexpr, TOK: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Bias, norm and rotation of the two halves a, b [P, TOK] of a head; then stores queries, or keys and values."""
    HALF: tl.constexpr = D // 2
    live = tokens < M
    if NORM:
        scale = norm_scales(squares, tokens, M, K, eps, TOK)[None, :]
        a, b = a * scale, b * scale
    if SCALED:
        a = a * tl.load(scales + outputs)[:, None]
        b = b * tl.load(scales + outputs + HALF)[:, None]
    if BIASED:
        a = a + tl.load(bias + outputs)[:, None]
        b = b + tl.load(bias + outputs + HALF)[:, None]
    if head < QH + KH:
        if NORMED:
            weights = q_norm if head < QH else k_norm
            own = tl.rsqrt(ordered_sum(a * a + b * b, TOK, LOG_P) / D + head_eps)[None, :]
            a = a * own * tl.load(weights + d)[:, None]
            b = b * own * tl.load(weights + d + HALF)[:, None]
        if ROTARY:
            at = tl.load(positions + tokens, mask=live, other=0).to(tl.int64)[None, :] * HALF + d[:, None]
            c, s = tl.load(cos + at), tl.load(sin + at)
            turned = a * c - b * s
            b = b * c + a * s
            a = turned
    if head < QH:
        at = q + (tokens[None, :].to(tl.int64) * QH + head) * D + d[:, None]
        tl.store(at, a.to(tl.bfloat16), mask=live[None, :])
        tl.store(at + HALF, b.to(tl.bfloat16), mask=live[None, :])
    else:
        mark = tl.load(drafted + tokens, mask=live, other=0)
        a, b = numbers_only(a, mark), numbers_only(b, mark)
        slot = tl.load(slots + tokens, mask=live, other=0).to(tl.int64)[None, :]
        if head < QH + KH:
            at = keys + ((head - QH).to(tl.int64) * SLOTS + slot) * D + d[:, None]
            tl.store(at, a.to(tl.bfloat16), mask=live[None, :])
            tl.store(at + HALF, b.to(tl.bfloat16), mask=live[None, :])
        else:
            at = values + ((head - QH - KH).to(tl.int64) * SLOTS + slot) * D + d[:, None]
            tl.store(at, a.to(tl.bfloat16), mask=live[None, :])
            tl.store(at + HALF, b.to(tl.bfloat16), mask=live[None, :])


@triton.jit(do_not_specialize=["M", "FIRST"], do_not_specialize_on_alignment=["positions", "slots", "drafted"])
def qkv_kernel(
    x, squares, w, scales, bias, q_norm, k_norm, cos, sin, q, keys, values, positions, slots, drafted, parts, counters,
    K, M, SLOTS, FIRST, eps, head_eps,
    QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LOG_P: tl.constexpr, SCALED: tl.constexpr,
    BIASED: tl.constexpr, NORMED: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    SPLITS: tl.constexpr, TOK: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program computes P elements of the first half of a head, and their partners in the second half."""
    PER_HEAD: tl.constexpr = D // 2 // P
    block, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = FIRST + block // PER_HEAD
    d = (block % PER_HEAD) * P + tl.arange(0, P)
    outputs = head * D + d
    tokens = group * TOK + tl.arange(0, TOK)
    first, last = range_of_split(split, K, SPLITS, BK)
    prefetch_rows(w, outputs, first, K, OVERLAP)
    prefetch_rows(w, outputs + D // 2, first, K, OVERLAP)
    wait_for_last(OVERLAP)
    a, b = multiplied_twice(w, outputs, outputs + D // 2, x, tokens < M, tokens, first, last, K, P, TOK, BK, EVEN)
    release_next(OVERLAP)
    if SPLITS == 1:
        finish_heads(
            a, b, outputs, squares, bias, scales, q_norm, k_norm, cos, sin, q, keys, values, positions, slots, drafted,
            head, d, tokens, K, M, SLOTS, eps, head_eps, QH, KH, D, P, LOG_P, TOK, SCALED, BIASED, NORMED, ROTARY, NORM,
        )  # fmt: skip
    else:
        tile, tiles = group * tl.num_programs(0) + block, tl.num_programs(0) * tl.num_programs(2)
        keep_part(parts, 2 * (split * tiles + tile), a, P, TOK)
        keep_part(parts, 2 * (split * tiles + tile) + 1, b, P, TOK)
        if arrives_last(counters + tile, SPLITS):
            a = sum_of_parts(parts, 2 * tile, 2 * tiles, P, TOK, SPLITS)
            b = sum_of_parts(parts, 2 * tile + 1, 2 * tiles, P, TOK, SPLITS)
            finish_heads(
                a, b, outputs, squares, bias, scales, q_norm, k_norm, cos, sin, q, keys, values, positions, slots,
                drafted, head, d, tokens, K, M, SLOTS, eps, head_eps, QH, KH, D, P, LOG_P, TOK, SCALED, BIASED, NORMED,
                ROTARY, NORM,
            )  # fmt: skip


def queries_keys_values(
    x: Tensor,
    weight: Weight,
    heads: Heads,
    rotary: tuple[Tensor, Tensor],
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    rows: int,
    places: tuple[Tensor, Tensor, Tensor],
    splitting: tuple[Tensor, Tensor],
    norm: Norm | None = None,
    first_head: int = 0,
    after_norm: bool = False,
) -> None:
    """Queries [rows, heads, head_size], and keys and values into the cache, each [kv_heads, slots, head_size].

    `places`: positions, slots, and which rows are drafted. `first_head`: first head to compute; the number of query
    heads skips all queries, if nothing needs them. `norm`, `after_norm`: as for `product`.
    """
    tiles, inputs, together = weight.tiles, weight.matrix.shape[1], tokens_together(rows)
    squares, eps = norm or (q, 0.0)
    pairs = heads.head_size // 2 if heads.norms else min(tiles.outputs, heads.head_size // 2)
    q_norm, k_norm = heads.norms or (q, q)
    blocks = (heads.heads + 2 * heads.kv_heads - first_head) * (heads.head_size // 2 // pairs)
    qkv_kernel[(blocks, tiles.splits, triton.cdiv(rows, together))](
        x, squares, weight.matrix, weight.scales, q if heads.bias is None else heads.bias,
        q_norm, k_norm, *rotary, q, *cache, *places, *splitting, inputs, rows, cache[0].shape[1], first_head, eps,
        heads.eps,
        heads.heads, heads.kv_heads, heads.head_size, pairs, pairs.bit_length() - 1, weight.scales.numel() > 0,
        heads.bias is not None, heads.norms is not None, heads.rotary, norm is not None, inputs % tiles.inputs == 0,
        tiles.splits, together, tiles.inputs, **options(tiles.warps, tiles.stages, inputs, after_norm),
    )  # fmt: skip
