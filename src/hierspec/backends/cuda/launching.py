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

# Let a kernel be set up while the one before it ends (programmatic dependent launch). Off until it is measured.
OVERLAP = False

NOT_SEEN = tl.constexpr(-1e30)  # a score: smaller than any other, and finite, so that differences are numbers


def options(warps: int, stages: int = 1) -> dict[str, Any]:
    """Of a launch, as Triton takes them."""
    chosen: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if not interpreted():
        chosen["enable_fp_fusion"] = False
        if OVERLAP and gdc_wait is not None:
            chosen["launch_pdl"] = True
    return chosen


def overlaps() -> bool:
    """Whether kernels wait for each other themselves."""
    return OVERLAP and gdc_wait is not None and not interpreted()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, for tests without a GPU."""
    return bool(triton.knobs.runtime.interpret)


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Before a program reads what the kernel before it wrote."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


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
    x = tl.trans(x)
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, (TOKENS, x.shape[1] // 2, 2)))
        x = even + odd
    return tl.reshape(x, (TOKENS,))
