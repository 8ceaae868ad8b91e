"""Which tokens a row's law holds, on a CPU: penalties, bias and filters without a sort of the vocabulary.

Top-k, top-p and min-p all keep the beginning of one order: falling logits, of equal ones the lower token first. So all
of them together are one place in that order, the last token kept. It is found from the largest of every 16 logits,
which leave out most of the row, and from sums of weight in buckets, coarse ones first. Adjusted logits are float32,
rounded once; weights are float64, as in `core/sampling.py`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
from numba import njit

from hierspec.backends.cpu.exponentials import light_sum, weigh_block
from hierspec.backends.cpu.kernels import CODE
from hierspec.backends.cpu.llvm import LANES

# Compiled functions are kept on disk under their own file; one in another file that uses these has this number as a
# default argument, so that a change here is a new signature. It is a float because numba takes all whole numbers that
# are defaults for one when it looks for the function to call, and the slow search that follows costs 0.3 ms a call.
_SOURCES = (Path(__file__), Path(__file__).with_name("exponentials.py"))
FILTER_CODE = float(zlib.crc32(b"".join(path.read_bytes() for path in _SOURCES), CODE))
LEAST = np.float32(np.finfo(np.float32).min)  # what is below it is forbidden
_FLOAT, _DOUBLE = 4, 8  # bytes
_BUCKETS, _WIDTH = 2048, 64  # buckets, and how many for a step of 1 in logits over the temperature
_HEAVY = 12  # a token this much below the best, over the temperature, weighs exp(-12) of it or more

part = njit(nogil=True, error_model="numpy")  # compiled into, and kept with, what calls it


@part
def count_tokens(context, prompt, repetition, counts, touched):
    """counts[token] = 1 + how often it was written after the prompt, for tokens of the text; how many `touched` lists.

    Tokens of the prompt alone count only where repetition is penalised.
    """
    number = 0
    for i in range(0 if repetition != 1 else prompt, len(context)):
        token = np.uint32(context[i])  # indices without a sign need no check
        if token >= len(counts):
            continue  # unknown to this model
        count = counts[token]
        touched[np.uint32(number)] = token  # stays if it is new: no branch that could be foretold wrongly
        number += count == 0
        counts[token] = max(count, np.int32(1)) + np.int32(i >= prompt)
    return number


@part
def _penalised(logit, count, repetition, presence, frequency):
    z = np.float64(logit)
    if count > 0:
        z = z / repetition if z > 0 else z * repetition
    if count > 1:
        z -= frequency * (count - 1) + presence
    return z


@part
def adjust(logits, node, tokens, parents, counts, touched, number, penalties, bias_tokens, bias_values, x):
    """x = one row's logits with penalties and bias; `node` is the last token of its text, -1: the context's."""
    repetition, presence, frequency = penalties
    for place in range(len(logits)):
        x[place] = logits[place]
    for place in range(len(logits), len(x)):
        x[place] = -np.inf
    known, up = number, node
    while up >= 0:
        token = np.uint32(tokens[up])
        if token < len(logits):
            if counts[token] == 0:
                counts[token] = 1
                touched[number] = token
                number += 1
            counts[token] += 1
        up = parents[up]
    for i in range(number):
        token = touched[i]
        x[token] = _penalised(logits[token], counts[token], repetition, presence, frequency)
    for i in range(len(bias_tokens)):
        token = np.uint32(bias_tokens[i])
        if token < len(logits):
            x[token] = _penalised(logits[token], counts[token], repetition, presence, frequency) + bias_values[i]
    while node >= 0:  # the next row has another path
        token = np.uint32(tokens[node])
        if token < len(logits):
            counts[token] -= 1
        node = parents[node]
    for i in range(known, number):
        counts[touched[i]] = 0


@part
def _falling(value):
    """A whole number of 32 bits that falls as a float32 rises; the two zeros are one."""
    bits = np.int64(np.float32(value + np.float32(0)).view(np.int32))
    return (1 << 31) - 1 - bits if bits >= 0 else bits + (1 << 32)


@part
def _crossing(mass, limit, before):
    """The first bucket with which the mass reaches `limit`, or the last that is not empty; the mass before it."""
    chosen = -1
    for bucket in range(len(mass)):
        if mass[bucket] > 0:
            if chosen >= 0:
                before += mass[chosen]
            chosen = bucket
            if before + mass[bucket] >= limit:
                break
    return chosen, before


@part
def _last_of(x, tokens, weights, limit, before):
    """Of tokens in rising order, x their values: the last, in falling order of value, with less than `limit` of weight
    before it (the first always is one). `before` is the weight of what is larger than all these."""
    count = len(x)
    for level in range(3):  # 11, 11 and 10 bits, until all that is left has one value
        shift = 21 if level == 0 else 10 if level == 1 else 0
        mass = np.zeros(2048)
        for i in range(count):
            mass[(_falling(x[i]) >> shift) & 2047] += weights[i]
        chosen, before = _crossing(mass, limit, before)
        left = 0
        for i in range(count):
            if (_falling(x[i]) >> shift) & 2047 == chosen:
                x[left], tokens[left], weights[left] = x[i], tokens[i], weights[i]
                left += 1
        count = left
    last = 0
    before += weights[0]
    while last + 1 < count and before < limit:
        last += 1
        before += weights[last]
    return tokens[last]


@part
def _bucket(value, largest, factor):
    """Falling values in rising buckets of equal width, the last without an end."""
    place = (largest - value) * factor
    return np.uint32(place if place < _BUCKETS - 1 else _BUCKETS - 1)


@part
def _masses(x, maxima, blocks, largest, factor, lowest, weights, mass):
    """mass[bucket] += the weights of its tokens; of blocks below `lowest` none."""
    for block in range(blocks):
        if maxima[block] >= lowest:
            for token in range(block * LANES, block * LANES + LANES):
                mass[_bucket(x[token], largest, factor)] += weights[token]


@part
def _members(x, maxima, blocks, largest, factor, lowest, chosen, tokens):
    """The tokens of one bucket, in rising order; how many."""
    count = 0
    for block in range(blocks):
        if maxima[block] >= lowest:
            for token in range(block * LANES, block * LANES + LANES):
                if _bucket(x[token], largest, factor) == chosen:
                    tokens[count] = token
                    count += 1
    return count


@part
def _last_within(x, maxima, blocks, largest, temperature, lowest, weights, limit):
    """The last token, in falling order of x, with less than `limit` of weight before it.

    It is known not to be below `lowest`: blocks that are do not matter.
    """
    mass, factor = np.zeros(_BUCKETS), np.float32(_WIDTH / temperature)
    _masses(x, maxima, blocks, np.float32(largest), factor, lowest, weights, mass)
    chosen, before = _crossing(mass, limit, 0.0)
    tokens = np.empty(len(x), np.int32)
    count = _members(x, maxima, blocks, np.float32(largest), factor, lowest, chosen, tokens)
    values, own = np.empty(count, np.float32), np.empty(count)
    for i in range(count):
        values[i], own[i] = x[tokens[i]], weights[tokens[i]]
    return _last_of(values, tokens, own, limit, before)


@part
def _kth_largest(x, maxima, blocks, k, largest, temperature, weights):
    """The k-th largest value of x; weights are overwritten."""
    lowest = LEAST
    if k <= blocks:  # k blocks hold k values at least as large as the smallest of their maxima
        values, order, ones = np.empty(blocks, np.float32), np.empty(blocks, np.int32), np.empty(blocks)
        for block in range(blocks):
            values[block], order[block], ones[block] = maxima[block], block, 1
        lowest = maxima[_last_of(values, order, ones, np.float64(k), 0.0)]
    for block in range(blocks):
        if maxima[block] >= lowest:
            for token in range(block * LANES, block * LANES + LANES):
                weights[token] = 1
    return x[_last_within(x, maxima, blocks, largest, temperature, lowest, weights, np.float64(k))]


@part
def weigh(x, maxima, blocks, scale, least, fine, weights, sums):
    """weights = exp((x - scale[0]) * scale[1]) of what is not below `least`, 0 beside it; sums of each 16; the sum.

    Weights are written only for blocks that reach `least`, and of these for the ones that reach `fine`.
    """
    total = 0.0
    for block in range(blocks):
        sums[block] = 0
        if maxima[block] < least:
            continue
        at = block * LANES
        if maxima[block] < fine:
            sums[block] = light_sum(x.ctypes.data + at * _FLOAT, scale.ctypes.data)
        else:
            sums[block] = weigh_block(
                x.ctypes.data + at * _FLOAT, scale.ctypes.data, weights.ctypes.data + at * _DOUBLE
            )
            if least > LEAST:
                sums[block] = 0
                for token in range(at, at + LANES):
                    if x[token] < least:
                        weights[token] = 0
                    sums[block] += weights[token]
        total += sums[block]
    return total


@part
def _lowest_kept(maxima, blocks, largest, factor, sums, rest):
    """A value below which there is no more weight than `rest`, so that nothing there is kept."""
    mass, counts = np.zeros(_BUCKETS), np.zeros(_BUCKETS, np.int32)
    below = 0.0  # weight of the blocks that are wholly in later buckets
    for block in range(blocks):
        bucket = _bucket(maxima[block], largest, factor)
        mass[bucket] += sums[block]
        counts[bucket] += 1
        below += sums[block]
    reaching, weight, step = 0, 1.0, math.exp(-1 / _WIDTH)
    for bucket in range(_BUCKETS - 1):
        below -= mass[bucket]
        reaching += counts[bucket]
        weight *= step
        if below + (LANES - 1) * reaching * weight <= rest:
            return largest - np.float32(bucket + 2) / factor
    return LEAST


@part
def last_kept(x, maxima, blocks, largest, temperature, top_k, top_p, min_p, weights, sums):
    """The law's end: (value, token, floor). Kept is what is larger than value, or equal with no higher a token, and
    over the temperature not below floor."""
    least, last = LEAST, len(x)
    if top_k > 0:  # equal ones all stay
        least = max(_kth_largest(x, maxima, blocks, top_k, largest, temperature, weights), LEAST)
    if top_p < 1:
        scale = np.empty(2)
        scale[0], scale[1] = largest, 1 / temperature
        # Of very light tokens, which can be many, only the sum matters, and little: float32 will do.
        fine = np.float32(largest - _HEAVY * temperature) if top_k == 0 else least
        total = weigh(x, maxima, blocks, scale, least, fine, weights, sums)
        lowest = least
        if top_k == 0:
            factor, rest = np.float32(_WIDTH / temperature), (1 - top_p) * total * (1 - 1e-5)
            lowest = max(_lowest_kept(maxima, blocks, np.float32(largest), factor, sums, rest), LEAST)
            for block in range(blocks):
                if lowest <= maxima[block] < fine:
                    at = block * LANES
                    weigh_block(x.ctypes.data + at * _FLOAT, scale.ctypes.data, weights.ctypes.data + at * _DOUBLE)
        last = int(_last_within(x, maxima, blocks, largest, temperature, lowest, weights, top_p * total))
        least = max(x[last], LEAST)
    floor = largest / temperature + np.log(min_p) if min_p > 0 else -np.inf
    return least, last, floor


@part
def is_kept(value, token, least, last, temperature, floor):
    if value < least or (value == least and token > last):
        return False
    return floor == -np.inf or value / temperature >= floor
