"""Kernels for heads and joins of drafters: products with listed rows of a head, and inputs of joins."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hierspec.backends.cuda.launching import options, prefetch_rows, release_next, wait_for_last
from hierspec.backends.cuda.products import Weight, multiplied
from hierspec.backends.cuda.tiling import tokens_together


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["listed", "count"])
def listed_kernel(
    x, w, scales, listed, count, out, K, M, stride, N,
    GATHER: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr, TOK: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[token, listed[n]] = row n of the weights, or row listed[n] (GATHER), times the token's state."""
    block, group = tl.program_id(0), tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    tokens = group * TOK + tl.arange(0, TOK)
    if not GATHER:
        prefetch_rows(w, tl.minimum(n, N - 1), 0, K, OVERLAP)
    wait_for_last(OVERLAP)
    size = tl.load(count) if GATHER else N
    if block * BN < size:
        column = tl.load(listed + n, mask=n < size, other=0)
        rows = column if GATHER else tl.minimum(n, N - 1)
        last = tl.cdiv(K, BK) * BK
        acc = multiplied(w, rows, x, tokens < M, tokens, 0, last, K, BN, TOK, BK, EVEN)
        release_next(OVERLAP)
        if SCALED:
            acc = acc * tl.load(scales + n, mask=n < N, other=0.0)[:, None]
        at = out + tokens[None, :].to(tl.int64) * stride + column[:, None]
        tl.store(at, acc, mask=(n < size)[:, None] & (tokens < M)[None, :])


def listed_product(x: Tensor, weight: Weight, listed: Tensor, out: Tensor, rows: int) -> None:
    """Logits of the listed tokens, whose rows these weights are, in their columns of `out` [rows, vocabulary]."""
    tiles, (outputs, inputs), together = weight.tiles, weight.matrix.shape, tokens_together(rows)
    listed_kernel[(triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, together))](
        x, weight.matrix, weight.scales, listed, listed, out, inputs, rows, out.stride(0), outputs,
        False, weight.scales.numel() > 0, inputs % tiles.inputs == 0, together, tiles.outputs, tiles.inputs,
        **options(tiles.warps, tiles.stages, inputs),
    )  # fmt: skip


# Tile sizes for extra tokens, which are few: programs wait for memory, so each step of a large head reads many inputs.
_EXTRA_ROWS, _EXTRA_DEPTHS = 16, (256, 64)


def gathered_product(
    x: Tensor, table: Tensor, listed: Tensor, count: Tensor, out: Tensor, rows: int, most: int
) -> None:
    """Logits of the first `count` listed tokens, at most `most`, from their rows of the whole head."""
    inputs, together = table.shape[1], tokens_together(rows)
    depth = _EXTRA_DEPTHS[inputs % _EXTRA_DEPTHS[0] > 0]
    listed_kernel[(triton.cdiv(most, _EXTRA_ROWS), triton.cdiv(rows, together))](
        x, table, x, listed, count, out, inputs, rows, out.stride(0), most,
        True, False, inputs % depth == 0, together, _EXTRA_ROWS, depth, **options(2, 4, inputs),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["tokens", "index", "slots"])
def join_inputs_kernel(
    tokens, index, embedding, states, taps, slots, gains, out, SLOTS, H, eps,
    INDEXED: tl.constexpr, PARTS: tl.constexpr, NORMED: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[row] = the embedding of its token, then states[tap, slot] for each tap, normed; slot -1 is zeros."""
    wait_for_last(OVERLAP)
    row, part, h = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    at = out + (row.to(tl.int64) * PARTS + part) * H + h
    if part == 0:
        number = tl.load(index + row) if INDEXED else row
        token = tl.maximum(tl.load(tokens + number), 0).to(tl.int64)  # -1 is no token, and nothing reads its result
        tl.store(at, tl.load(embedding + token * H + h, mask=h < H, other=0.0), mask=h < H)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        tap = tl.load(taps + part - 1).to(tl.int64)
        line = states + (tap * SLOTS + tl.maximum(slot, 0)) * H + h
        numbers = tl.load(line, mask=h < tl.where(slot >= 0, H, 0), other=0.0)
        if NORMED:
            scale = tl.rsqrt(tl.sum(numbers * numbers) / H + eps)
            numbers = numbers * scale * tl.load(gains + (part - 1) * H + h, mask=h < H, other=0.0)
        tl.store(at, numbers.to(tl.bfloat16), mask=h < H)


def join_inputs(
    tokens: Tensor,
    embedding: Tensor,
    states: Tensor,
    taps: Tensor,
    slots: Tensor,
    gains: Tensor | None,
    out: Tensor,
    rows: int,
    eps: float,
    index: Tensor | None = None,
) -> None:
    """`states` [taps, slots, hidden] float32; `out` [rows, (1 + taps) * hidden] bfloat16. `index`: where each row's
    token is among the tokens."""
    hidden, count = states.shape[2], len(taps)
    width = triton.next_power_of_2(hidden)
    join_inputs_kernel[(rows, 1 + count)](
        tokens, slots if index is None else index, embedding, states, taps, slots, states if gains is None else gains,
        out, states.stride(0) // hidden, hidden, eps, index is not None, 1 + count, gains is not None, width,
        **options(8 if width > 1024 else 4, 1, hidden),
    )  # fmt: skip
