"""Launching kernels: shared launch options, and how a kernel overlaps with the one before and the one after.

Multiplications and additions are never fused: the compiler could choose differently in two variants of a kernel, and a
row would then have other bits in another pass.
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

# Programmatic dependent launch: a kernel starts up and prefetches its weights while the previous one ends. Waiting
# programs take room from working ones, so the next kernel may start only when this one has read its weights or keys.
# H200, ms for one token after 128, without overlap, with this, and with an earlier start: default model 0.83, 0.61,
# 0.73; 8B shape 4.21, 4.23, 5.30 (after 2,048 tokens 4.45 and 4.69). So only small kernels overlap, and of large ones
# norms and the products after them (`add_norm`): 4.48 without, 4.36 with this.
OVERLAP = True
SMALL = 1024  # most inputs or outputs of a small kernel
_PREFETCHED = 512  # weights of a row to prefetch: what memory delivers while a small kernel starts
_PREFETCHED_AT_NORM = 128  # the same for the many more rows after a norm of large states


class Compiling:
    """Time spent compiling kernels: wherever one is launched first, that is no cost of the pass that needed it."""

    seconds = 0.0

    @staticmethod
    def listen() -> None:
        """Have Triton tell of everything that it compiles from now on; who listens already goes on listening."""
        previous = getattr(triton.knobs.compilation, "listener", None)

        def listener(*, times, **about):
            Compiling.seconds += times.total / 1e6
            if previous is not None:
                previous(times=times, **about)

        triton.knobs.compilation.listener = listener


Compiling.listen()

NOT_SEEN = tl.constexpr(-1e30)  # masked score: below any other, and finite, so that differences are not NaN


def options(warps: int, stages: int, size: int, at_norm: bool = False) -> dict[str, Any]:
    """Launch options for Triton, and `OVERLAP`: how many weights of a row the kernel prefetches before it waits for the
    previous one; 0 if launches do not overlap.

    `size`: the smaller side of its matrix or its states. `at_norm`: it adds and norms states, or is the product after
    that.
    """
    chosen: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "OVERLAP": 0}
    if interpreted():
        return chosen
    chosen["enable_fp_fusion"] = False
    if not OVERLAP or gdc_wait is None or (size > SMALL and not at_norm):
        return chosen
    # A kernel that starts early and does not wait would read data before it is written: set both or neither.
    return {**chosen, "OVERLAP": _PREFETCHED if size <= SMALL else _PREFETCHED_AT_NORM, "launch_pdl": True}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, for tests without a GPU."""
    return bool(triton.knobs.runtime.interpret)


_LINE = tl.constexpr(64)  # 2-byte weights per memory transaction


@triton.jit
def release_next(OVERLAP: tl.constexpr):
    """Allows the next kernel to start. It waits before it reads anything but weights."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Waits for the previous kernel, and all before it."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def prefetch(places):
    """Prefetches these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_rows(w, rows, first, K, OVERLAP: tl.constexpr):
    """Prefetches the first inputs of these rows of weights, from `first` on; no kernel writes weights."""
    if OVERLAP:
        column = tl.minimum(first + tl.arange(0, OVERLAP // _LINE) * _LINE, K - 1)
        prefetch(w + rows[:, None].to(tl.int64) * K + column[None, :])


@triton.jit
def arrives_last(counter, count):
    """Counts this program among `count`; true for the last one, which sees what the others have stored.

    Resets the counter to zero for the next kernel.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def ordered_sum(x, TOKENS: tl.constexpr, STEPS: tl.constexpr):
    """[TOKENS] sums over the first axis of [2**STEPS, TOKENS], pairwise from neighbours up: one order for any
    layout."""
    return tl.reshape(sums_of_neighbours(tl.trans(x), TOKENS, STEPS), (TOKENS,))


@triton.jit
def sums_of_neighbours(x, TOKENS: tl.constexpr, STEPS: tl.constexpr):
    """Pairwise sums of every 2**STEPS neighbours in each row of [TOKENS, any]."""
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, (TOKENS, x.shape[1] // 2, 2)))
        x = even + odd
    return x
