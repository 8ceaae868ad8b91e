"""The norm before a product: without its own kernel for small states, with one for large states.

Small: the kernel that adds to the hidden states also writes them times the gain of the next norm, and sums of their
squares: the states "enter" the norm. The product that reads them divides its sums by the root mean square at the end.
So a norm costs neither a launch nor a wait. Squares are summed in groups of `GROUP` neighbours, and the groups in one
order, for any tile size.

Large: products are split, and the program that arrives last would wait for the other parts, then for the sums of
squares. One kernel that adds the parts to the states and norms them (`add_norm`) takes less time, because the next
product prefetches its weights meanwhile. H200, 8B shape, ms for 1 / 16 / 64 tokens after 2,048: 4.52 / 4.84 / 5.75
without its own kernel, 4.36 / 4.71 / 5.45 with it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hierspec.backends.cuda.launching import options, ordered_sum, release_next, sums_of_neighbours, wait_for_last

GROUP = 16  # neighbours whose squares are summed first: rows of the smallest tile
_GROUP, _GROUP_STEPS = tl.constexpr(GROUP), tl.constexpr(GROUP.bit_length() - 1)
_TOGETHER, _TOGETHER_STEPS = tl.constexpr(64), tl.constexpr(6)  # groups that are loaded at once


class Entering(NamedTuple):
    """Hidden states that have entered a norm."""

    scaled: Tensor  # [rows, hidden] bfloat16: times the gain of the norm, not yet divided
    squares: Tensor  # [rows, groups] float32


class Norm(NamedTuple):
    """The rest of a norm, which the product applies."""

    squares: Tensor
    eps: float


def groups_of(hidden: int) -> int:
    return triton.cdiv(hidden, GROUP)


@triton.jit
def enter(states, gain, scaled, squares, outputs, tokens, N, M, BN: tl.constexpr, TOK: tl.constexpr):
    """Lets states [BN, TOK] enter the norm with this gain; the first output is a multiple of BN."""
    real = outputs < N
    inside = real[:, None] & (tokens < M)[None, :]
    gains = tl.load(gain + outputs, mask=real, other=0.0)
    at = scaled + tokens[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(at, (states * gains[:, None]).to(scaled.dtype.element_ty), mask=inside)
    states = tl.where(real[:, None], states, 0.0)
    sums = sums_of_neighbours(tl.trans(states * states), TOK, _GROUP_STEPS)
    groups = tl.cdiv(N, _GROUP)
    group = tl.min(outputs) // _GROUP + tl.arange(0, BN // _GROUP)
    at = squares + tokens[:, None].to(tl.int64) * groups + group[None, :]
    tl.store(at, sums, mask=(tokens < M)[:, None] & (group < groups)[None, :])


@triton.jit
def norm_scales(squares, tokens, M, K, eps, TOK: tl.constexpr):
    """For each token, the factor for the sums of a product over K normed inputs."""
    groups, g = tl.cdiv(K, _GROUP), tl.arange(0, _TOGETHER)
    total = tl.zeros((TOK, _TOGETHER), tl.float32)
    for first in range(0, groups, _TOGETHER):
        at = squares + tokens[:, None].to(tl.int64) * groups + first + g[None, :]
        total += tl.load(at, mask=(tokens < M)[:, None] & (first + g < groups)[None, :], other=0.0)
    return tl.rsqrt(ordered_sum(tl.trans(total), TOK, _TOGETHER_STEPS) / K + eps)


@triton.jit
def enter_kernel(hidden, gain, scaled, squares, N, M, BN: tl.constexpr, TOK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_last(OVERLAP)
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * TOK + tl.arange(0, TOK)
    inside = (outputs < N)[:, None] & (tokens < M)[None, :]
    states = tl.load(hidden + tokens[None, :].to(tl.int64) * N + outputs[:, None], mask=inside, other=0.0)
    enter(states, gain, scaled, squares, outputs, tokens, N, M, BN, TOK)


_OUTPUTS, _TOKENS = 64, 16  # per program


def enter_norm(hidden: Tensor, gain: Tensor, entering: Entering, rows: int) -> None:
    """Lets hidden states [rows, hidden] enter a norm, if no product has just written them."""
    size = hidden.shape[-1]
    grid = triton.cdiv(size, _OUTPUTS), triton.cdiv(rows, _TOKENS)
    enter_kernel[grid](hidden, gain, *entering, size, rows, _OUTPUTS, _TOKENS, **options(2, 1, size))


@triton.jit
def norm_kernel(hidden, gain, out, H, eps, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """out = hidden / root mean square * gain, one token per program: its sums never depend on other tokens."""
    wait_for_last(OVERLAP)
    token, h = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    numbers = tl.load(hidden + token * H + h, mask=h < H, other=0.0)
    scale = tl.rsqrt(tl.sum(numbers * numbers) / H + eps)
    weights = tl.load(gain + h, mask=h < H, other=0.0)
    tl.store(out + token * H + h, (numbers * weights * scale).to(out.dtype.element_ty), mask=h < H)


def norm(hidden: Tensor, gain: Tensor, out: Tensor, rows: int, eps: float) -> None:
    """A complete norm, for results that no product of this decoder reads."""
    size = hidden.shape[-1]
    width = triton.next_power_of_2(size)
    norm_kernel[(rows,)](hidden, gain, out, size, eps, width, **options(8 if width > 1024 else 4, 1, size))


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["slots"])
def add_norm_kernel(
    parts, hidden, gain, out, states, slots, H, M, eps,
    PARTS: tl.constexpr, TAPPED: tl.constexpr, NORMED: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds parts [PARTS, M, H] to the hidden states, in order, and norms them, one token per program."""
    release_next(OVERLAP)  # at once: this kernel is small, and the next one's programs only prefetch and wait
    wait_for_last(OVERLAP)
    token, h = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    numbers = tl.load(hidden + token * H + h, mask=h < H, other=0.0)
    for part in tl.static_range(PARTS):
        numbers += tl.load(parts + (part * M + token) * H + h, mask=h < H, other=0.0)
    tl.store(hidden + token * H + h, numbers, mask=h < H)
    if TAPPED:
        slot = tl.load(slots + token).to(tl.int64)
        tl.store(states + slot * H + h, numbers, mask=h < H)
    if NORMED:
        scale = tl.rsqrt(tl.sum(numbers * numbers) / H + eps)
        weights = tl.load(gain + h, mask=h < H, other=0.0)
        tl.store(out + token * H + h, (numbers * weights * scale).to(out.dtype.element_ty), mask=h < H)


def add_norm(
    parts: Tensor,
    count: int,
    hidden: Tensor,
    gain: Tensor | None,
    out: Tensor,
    rows: int,
    eps: float,
    tap: tuple[Tensor, Tensor] | None = None,
) -> None:
    """hidden += the sum of `count` parts, each [rows, hidden]; then out = norm(hidden), unless there is no gain.

    `tap`: states [slots, hidden] that get the hidden states too, and the slots of rows.
    """
    size = hidden.shape[-1]
    width = triton.next_power_of_2(size)
    states, slots = tap or (hidden, hidden)
    add_norm_kernel[(rows,)](
        parts, hidden, hidden if gain is None else gain, out, states, slots, size, rows, eps,
        count, tap is not None, gain is not None, width, **options(8 if width > 1024 else 4, 1, size, at_norm=True),
    )  # fmt: skip
