"""The best tokens of a row, in one kernel: the largest logits, or the largest of logit + keyed noise.

Everything is float64, as in the reference (`core/sampling.py`). On a data centre GPU that costs nothing beside reading
the logits, and float32 could tie or reorder scores that differ in the reference. Equal scores go to the smaller token,
as in numpy.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hierspec.backends.cuda.launching import arrives_last, options, wait_for_last

BLOCK = 1024  # tokens per program
PARAMETERS = 4  # per row: two words of the noise key, what to do, and the bits of the temperature
NOTHING, GREEDY, SAMPLED = 0, 1, 2  # what to do with a row
_SAMPLED = tl.constexpr(SAMPLED)
_NO_TOKEN = tl.constexpr(1 << 30)


@triton.jit
def mixed(h):
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def keyed_noise(token, low, high):
    """`core.sampling.gumbel`. 1 - uniform is exact, so its logarithm equals log1p(-uniform)."""
    h = mixed(mixed(token.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    uniform = ((h >> 1).to(tl.float64) + 0.5) / 2147483648.0
    return -tl.log(-tl.log(1.0 - uniform))


@triton.jit
def best_of(scores, tokens, taken):
    """The largest score and its token, the smallest among equals; `taken` entries are excluded."""
    left = tl.where(taken, float("-inf"), scores)
    best = tl.max(left)
    token = tl.min(tl.where((left == best) & (taken == 0), tokens, _NO_TOKEN))
    return best, token


@triton.jit
def best_of_blocks(scores, tokens, out, row, COUNT: tl.constexpr, BLOCKS: tl.constexpr, LISTED: tl.constexpr):
    """The answer for a row, from the best tokens of its blocks."""
    listed = tl.arange(0, LISTED)
    inside = listed < BLOCKS * COUNT
    at = row * BLOCKS * COUNT + listed
    # Other multiprocessors wrote these: bypass this one's L1 cache.
    z = tl.load(scores + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + at, mask=inside, other=_NO_TOKEN, cache_modifier=".cg")
    taken = token >= _NO_TOKEN
    ahead = tl.max(z)
    lead = ahead - ahead
    number = (ahead < float("inf")) & (ahead > float("-inf"))
    for place in tl.static_range(COUNT):
        best, which = best_of(z, token, taken)
        taken = taken | (token == which)
        tl.store(out + row * (COUNT + 1) + place, tl.where(number, which, -1).to(tl.int64))
        if place == 1:
            lead = ahead - best
    tl.store(out + row * (COUNT + 1) + COUNT, lead.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize_on_alignment=["parameters", "out"])
def pick_kernel(
    logits, stride, parameters, scores, tokens, counters, out, V,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LISTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[row] = COUNT tokens, best first, then the bits of the lead of the first over the second.

    The tokens are -1 if the largest logit is not finite. BLOCKS: programs per row; LISTED: a power of two, at least
    COUNT * BLOCKS.
    """
    wait_for_last(OVERLAP)
    row, block = tl.program_id(0), tl.program_id(1)
    use = tl.load(parameters + row * 4 + 2)
    if use != 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < V, other=float("-inf")).to(tl.float64)
        if use == _SAMPLED:
            low = tl.load(parameters + row * 4).to(tl.uint32)
            high = tl.load(parameters + row * 4 + 1).to(tl.uint32)
            z = z / tl.load(parameters + row * 4 + 3).to(tl.float64, bitcast=True) + keyed_noise(token, low, high)
        z = tl.where(z != z, float("inf"), z)  # NaN becomes infinity, which is refused at the end
        taken = token >= V
        for place in tl.static_range(COUNT):
            best, which = best_of(z, token, taken)
            taken = taken | (token == which)
            at = (row * BLOCKS + block) * COUNT + place
            tl.store(scores + at, best)
            tl.store(tokens + at, which)
        if arrives_last(counters + row, BLOCKS):
            best_of_blocks(scores, tokens, out, row, COUNT, BLOCKS, LISTED)


def blocks_of(vocabulary: int) -> int:
    return triton.cdiv(vocabulary, BLOCK)


def launch_picks(
    logits: Tensor, parameters: Tensor, scratch: tuple[Tensor, Tensor, Tensor], out: Tensor, rows: int, count: int
) -> None:
    """`parameters` [rows, 4] int64; `scratch`: scores, tokens, and zeros; `out` [rows, count + 1] int64."""
    vocabulary = logits.shape[1]
    blocks = blocks_of(vocabulary)
    pick_kernel[(rows, blocks)](
        logits, logits.stride(0), parameters, *scratch, out, vocabulary,
        count, BLOCK, blocks, triton.next_power_of_2(blocks * count), **options(4, 1, 0),
    )  # fmt: skip
