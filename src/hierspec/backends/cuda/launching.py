"""How kernels are started: options that all of them share, and what a program does before it reads and after it wrote.

Multiplications and additions are never contracted: the compiler could decide otherwise in two variants of one kernel,
and then a row would have other bits in another pass.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton: launches do not overlap
    gdc_wait = gdc_launch_dependents = None

# Let a kernel be set up, and ask for its weights, while the one before it ends (programmatic dependent launch). What
# waits takes room from what works, so it may come when the one before has read its weights or keys. An H200, ms for one
# token after 128, without, so, and from the start on: the default model 0.83, 0.61, 0.73; an 8B shape 4.21, 4.23, 5.30
# (after 2,048 tokens 4.45 and 4.69). So only small kernels do.
OVERLAP = True
_SMALL = 1024  # inputs or outputs up to which kernels are small

NOT_SEEN = tl.constexpr(-1e30)  # a score: smaller than any other, and finite, so that differences are numbers


def options(warps: int, stages: int, size: int) -> dict[str, Any]:
    """Of a launch, as Triton takes them, and whether the kernel waits itself for the one before it: by `size`, the
    smaller side of its matrix or its states."""
    if interpreted():
        return {"num_warps": warps, "num_stages": stages, "OVERLAP": False}
    overlap = OVERLAP and size <= _SMALL and gdc_wait is not None
    # A kernel that is set up early and does not wait would read what is not written yet: both at once, or neither.
    chosen: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "OVERLAP": overlap, "enable_fp_fusion": False}
    return {**chosen, "launch_pdl": True} if overlap else chosen


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, for tests without a GPU."""
    return bool(triton.knobs.runtime.interpret)


_LINE = tl.constexpr(64)  # weights of two bytes in what memory hands out at once
_PREFETCHED = tl.constexpr(512)  # weights of a row that are asked for early: what memory brings while a kernel starts


@triton.jit
def release_next(OVERLAP: tl.constexpr):
    """The kernel after this one may be set up. It waits before it reads anything but weights."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one, and all before that."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def prefetch(places):
    """Ask memory for what is at these addresses, without waiting for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_rows(w, rows, first, K, OVERLAP: tl.constexpr):
    """The first inputs of these rows of weights, from `first` on: no other kernel writes those."""
    if OVERLAP:
        column = tl.minimum(first + tl.arange(0, _PREFETCHED // _LINE) * _LINE, K - 1)
        prefetch(w + rows[:, None].to(tl.int64) * K + column[None, :])


@triton.jit
def arrives_last(counter, count):
    """Count this program in among so many; true for the last one, which sees what the others have stored. The counter
    is then zero again, for the next kernel."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def ordered_sum(x, TOKENS: tl.constexpr, STEPS: tl.constexpr):
    """[TOKENS] sums over the first axis of [2**STEPS, TOKENS], neighbours first: one order, whatever the layout."""
    return tl.reshape(sums_of_neighbours(tl.trans(x), TOKENS, STEPS), (TOKENS,))


@triton.jit
def sums_of_neighbours(x, TOKENS: tl.constexpr, STEPS: tl.constexpr):
    """Of each 2**STEPS numbers of a row of [TOKENS, any], two by two."""
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, (TOKENS, x.shape[1] // 2, 2)))
        x = even + odd
    return x
