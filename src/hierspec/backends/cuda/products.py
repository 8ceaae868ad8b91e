"""Products with weights: out[token, output] = sum over inputs, in an order that only the weights' shape determines.

Weights are the left operand and tokens the right one, so a token is a column and its sums do not depend on how many
columns there are. Weights are bfloat16, or 8-bit integers with a scale per output: those are multiplied as bfloat16,
which represents them exactly, and the scale is applied last.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hierspec.backends.cuda.launching import (
    arrives_last,
    options,
    prefetch_rows,
    release_next,
    wait_for_last,
)
from hierspec.backends.cuda.norms import Entering, Norm, enter, norm_scales
from hierspec.backends.cuda.tiling import Tiles, tiles_for, tokens_together


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix [outputs, inputs] in the form that kernels read."""

    matrix: Tensor  # bfloat16 or int8, on the device
    scales: Tensor  # [outputs] float32, or empty
    tiles: Tiles

    @property
    def bytes(self) -> int:
        return self.matrix.numel() * self.matrix.element_size() + self.scales.numel() * self.scales.element_size()


def weight(what: str, matrix: Tensor, format: str, device: torch.device, widest: int = 64) -> Weight:
    """A matrix in this format, with the tiles for its shape."""
    outputs, inputs = matrix.shape
    if format == "int8":
        placed, scales = quantised(matrix.to(device))
    else:
        placed = matrix.to(device, torch.bfloat16).contiguous()
        scales = torch.empty(0, device=device)
    bits = 8 * placed.element_size()
    return Weight(placed, scales, tiles_for(what, outputs, inputs, bits, widest))


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit integers and a scale per row: the largest weight of a row becomes 127."""
    floats = matrix.float()
    scales = floats.abs().amax(dim=1).clamp(min=1e-30) / 127
    return (floats / scales[:, None]).round().to(torch.int8).contiguous(), scales.contiguous()


@triton.jit
def as_bfloat16(weights):
    """Weights as bfloat16; 8-bit integers keep their values."""
    if weights.dtype == tl.int8:
        weights = weights.to(tl.float32)
    return weights.to(tl.bfloat16)


@triton.jit
def multiplied(
    w, outputs, x, live, tokens, first, last, K,
    BN: tl.constexpr, TOK: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sums [BN, TOK] over the inputs first..last."""
    k = tl.arange(0, BK)
    rows = w + outputs[:, None].to(tl.int64) * K
    columns = x + tokens[None, :].to(tl.int64) * K
    acc = tl.zeros((BN, TOK), tl.float32)
    for at in range(first, last, BK):
        here = at + k
        if EVEN:
            part = tl.load(rows + here[None, :])
            inputs = tl.load(columns + here[:, None], mask=live[None, :], other=0.0)
        else:
            part = tl.load(rows + here[None, :], mask=(here < K)[None, :], other=0)
            inputs = tl.load(columns + here[:, None], mask=live[None, :] & (here < K)[:, None], other=0.0)
        acc = tl.dot(as_bfloat16(part), inputs, acc)
    return acc


@triton.jit
def multiplied_twice(
    w, outputs, others, x, live, tokens, first, last, K,
    BN: tl.constexpr, TOK: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same for two tiles of outputs, whose inputs are loaded once."""
    k = tl.arange(0, BK)
    rows = w + outputs[:, None].to(tl.int64) * K
    other_rows = w + others[:, None].to(tl.int64) * K
    columns = x + tokens[None, :].to(tl.int64) * K
    acc = tl.zeros((BN, TOK), tl.float32)
    other = tl.zeros((BN, TOK), tl.float32)
    for at in range(first, last, BK):
        here = at + k
        if EVEN:
            part = tl.load(rows + here[None, :])
            other_part = tl.load(other_rows + here[None, :])
            inputs = tl.load(columns + here[:, None], mask=live[None, :], other=0.0)
        else:
            part = tl.load(rows + here[None, :], mask=(here < K)[None, :], other=0)
            other_part = tl.load(other_rows + here[None, :], mask=(here < K)[None, :], other=0)
            inputs = tl.load(columns + here[:, None], mask=live[None, :] & (here < K)[:, None], other=0.0)
        acc = tl.dot(as_bfloat16(part), inputs, acc)
        other = tl.dot(as_bfloat16(other_part), inputs, other)
    return acc, other


@triton.jit
def range_of_split(split, K, SPLITS: tl.constexpr, BK: tl.constexpr):
    """The inputs that a split sums over, in whole steps of BK."""
    per = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    return split * per, tl.minimum(split * per + per, tl.cdiv(K, BK) * BK)


@triton.jit
def keep_part(parts, part, acc, BN: tl.constexpr, TOK: tl.constexpr):
    n, t = tl.arange(0, BN), tl.arange(0, TOK)
    tl.store(parts + part.to(tl.int64) * BN * TOK + n[:, None] * TOK + t[None, :], acc)


@triton.jit
def sum_of_parts(parts, first, stride, BN: tl.constexpr, TOK: tl.constexpr, SPLITS: tl.constexpr):
    """Partial sums of all splits, added in order. Other multiprocessors wrote them: bypass this one's L1 cache."""
    n, t = tl.arange(0, BN), tl.arange(0, TOK)
    acc = tl.zeros((BN, TOK), tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + (first + split * stride).to(tl.int64) * BN * TOK + n[:, None] * TOK + t[None, :]
        acc += tl.load(at, cache_modifier=".cg")
    return acc


# What becomes of the sums: stored, or the sums of each split stored apart, for a kernel that adds them (`add_norm`), or
# added to the hidden states, which may also go to a tap.
STORE, STORE_PARTS, ADD, ADD_AND_TAP = (tl.constexpr(n) for n in range(4))


@triton.jit
def sums_so_far(out, outputs, tokens, N, M, BN: tl.constexpr, TOK: tl.constexpr, END: tl.constexpr):
    """What the sums are added to. Loaded before the weights, so that it has arrived when the sums are done."""
    before = tl.zeros((BN, TOK), tl.float32)
    if END >= ADD:
        inside = (outputs < N)[:, None] & (tokens < M)[None, :]
        before = tl.load(out + tokens[None, :].to(tl.int64) * N + outputs[:, None], mask=inside, other=0.0)
    return before


@triton.jit
def finish(
    acc, before, scales, bias, out, states, slots, gain, entering, squares, outputs, tokens, N, M,
    END: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, ENTERS: tl.constexpr, BN: tl.constexpr,
    TOK: tl.constexpr,
):  # fmt: skip
    """Stores the sums, or adds them to the hidden states, which may also go to a tap and enter the next norm."""
    inside = (outputs < N)[:, None] & (tokens < M)[None, :]
    if SCALED:
        acc = acc * tl.load(scales + outputs, mask=outputs < N, other=0.0)[:, None]
    if BIASED:
        acc = acc + tl.load(bias + outputs, mask=outputs < N, other=0.0)[:, None]
    at = out + tokens[None, :].to(tl.int64) * N + outputs[:, None]
    if END >= ADD:
        acc += before
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
    if END == ADD_AND_TAP:
        slot = tl.load(slots + tokens, mask=tokens < M, other=0).to(tl.int64)
        tl.store(states + slot[None, :] * N + outputs[:, None], acc, mask=inside)
    if ENTERS:
        enter(acc, gain, entering, squares, outputs, tokens, N, M, BN, TOK)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["slots"])
def product_kernel(
    x, squares_in, w, scales, bias, out, states, slots, gain, entering, squares, parts, counters, N, K, M, eps,
    END: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, NORM: tl.constexpr, ENTERS: tl.constexpr,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, TOK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    block, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs = block * BN + tl.arange(0, BN)
    tokens = group * TOK + tl.arange(0, TOK)
    first, last = range_of_split(split, K, SPLITS, BK)
    rows = tl.minimum(outputs, N - 1)
    prefetch_rows(w, rows, first, K, OVERLAP)
    wait_for_last(OVERLAP)
    before = sums_so_far(out, outputs, tokens, N, M, BN, TOK, END)
    acc = multiplied(w, rows, x, tokens < M, tokens, first, last, K, BN, TOK, BK, EVEN)
    release_next(OVERLAP)
    if END == STORE_PARTS:
        finish(
            acc, before, scales, bias, out + split.to(tl.int64) * M * N, states, slots, gain, entering, squares,
            outputs, tokens, N, M, END, SCALED, BIASED, ENTERS, BN, TOK,
        )  # fmt: skip
    elif SPLITS == 1:
        if NORM:
            acc = acc * norm_scales(squares_in, tokens, M, K, eps, TOK)[None, :]
        finish(
            acc, before, scales, bias, out, states, slots, gain, entering, squares, outputs, tokens, N, M,
            END, SCALED, BIASED, ENTERS, BN, TOK,
        )  # fmt: skip
    else:
        tile, tiles = group * tl.num_programs(0) + block, tl.num_programs(0) * tl.num_programs(2)
        keep_part(parts, split * tiles + tile, acc, BN, TOK)
        if arrives_last(counters + tile, SPLITS):
            acc = sum_of_parts(parts, tile, tiles, BN, TOK, SPLITS)
            if NORM:
                acc = acc * norm_scales(squares_in, tokens, M, K, eps, TOK)[None, :]
            finish(
                acc, before, scales, bias, out, states, slots, gain, entering, squares, outputs, tokens, N, M,
                END, SCALED, BIASED, ENTERS, BN, TOK,
            )  # fmt: skip


def product(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    rows: int,
    splitting: tuple[Tensor, Tensor],
    end: int = 0,
    tap: tuple[Tensor, Tensor] | None = None,
    norm: Norm | None = None,
    enters: tuple[Tensor, Entering] | None = None,
    bias: Tensor | None = None,
    after_norm: bool = False,
) -> None:
    """out[row] = weight x[row], or out[row] += weight x[row], or out[split, row] = a part of it (`end`), for `rows`
    rows.

    `tap`: states [slots, outputs] and the slots of rows. `norm`: of the inputs. `enters`: gain of the next norm, and
    where the sums enter it. `splitting`: scratch for partial sums, and counters that are zero. `after_norm`: the kernel
    before it is `add_norm`.
    """
    tiles, (outputs, inputs), together = weight.tiles, weight.matrix.shape, tokens_together(rows)
    states, slots = tap or (out, splitting[1])
    gain, entering = enters or (out, Entering(out, out))
    squares, eps = norm or (out, 0.0)
    grid = (triton.cdiv(outputs, tiles.outputs), tiles.splits, triton.cdiv(rows, together))
    product_kernel[grid](
        x, squares, weight.matrix, weight.scales, weight.scales if bias is None else bias, out, states, slots,
        gain, entering.scaled, entering.squares, *splitting, outputs, inputs, rows, eps,
        end, weight.scales.numel() > 0, bias is not None, norm is not None, enters is not None,
        inputs % tiles.inputs == 0, tiles.splits, together, tiles.outputs, tiles.inputs,
        **options(tiles.warps, tiles.stages, min(outputs, inputs), after_norm),
    )  # fmt: skip


def parts_needed(outputs: int, tiles: Tiles, rows: int, halves: int = 1) -> tuple[int, int]:
    """Floats and counters that the splits of a product need for this many rows."""
    if tiles.splits == 1:
        return 0, 0
    together = tokens_together(rows)
    blocks = triton.cdiv(outputs, tiles.outputs * halves) * triton.cdiv(rows, together)
    return blocks * tiles.splits * tiles.outputs * together * halves, blocks
