"""Penalties, bias and filters of a row's distribution on a CPU, without sorting the vocabulary.

Top-k, top-p and min-p each keep a prefix of the same order: descending logits, lower token ids first among equals. So
together they are one cutoff in that order: the last token that passes. The maxima of every 16 logits rule out most of
the row; sums of weights in buckets, coarse ones first, then find the cutoff. Adjusted logits are float32, rounded once;
weights are float64, as in `core/sampling.py`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import numpy as np

from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.exponentials import exp_block, exp_block_sum
from hierspec.backends.cpu.llvm import LANES

LEAST = np.float32(np.finfo(np.float32).min)  # tokens below this are forbidden
_FLOAT, _DOUBLE = 4, 8  # bytes
_BUCKETS, _BUCKETS_PER_LOGIT = 2048, 64  # for one unit of logits over the temperature
_HEAVY = 12  # tokens at most this far below the best (logits over the temperature) are summed in float64


@part
def count_tokens(context, prompt, repetition, counts, touched):
    """counts[token] = 1 + how often the token was written after the prompt, for tokens of the text.

    Lists those tokens in `touched` and returns how many there are. Tokens that are only in the prompt count only if
    repetition is penalised.
    """
    number = 0
    for i in range(0 if repetition != 1 else prompt, len(context)):
        token = np.uint32(context[i])  # unsigned indices need no check
        if token >= len(counts):
            continue  # not in this model's vocabulary
        count = counts[token]
        touched[np.uint32(number)] = token  # overwritten unless the token is new: no branch to mispredict
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
    """x = one row's logits with penalties and bias; `node` is the last proposed token of its path, -1 if there is
    none."""
    repetition, presence, frequency = penalties
    for i in range(len(logits)):
        x[i] = logits[i]
    for i in range(len(logits), len(x)):
        x[i] = -np.inf
    in_context, ancestor = number, node
    while ancestor >= 0:
        token = np.uint32(tokens[ancestor])
        if token < len(logits):
            if counts[token] == 0:
                counts[token] = 1
                touched[number] = token
                number += 1
            counts[token] += 1
        ancestor = parents[ancestor]
    for i in range(number):
        token = touched[i]
        x[token] = _penalised(logits[token], counts[token], repetition, presence, frequency)
    for i in range(len(bias_tokens)):
        token = np.uint32(bias_tokens[i])
        if token < len(logits):
            x[token] = _penalised(logits[token], counts[token], repetition, presence, frequency) + bias_values[i]
    while node >= 0:  # undo the counts: the next row has another path
        token = np.uint32(tokens[node])
        if token < len(logits):
            counts[token] -= 1
        node = parents[node]
    for i in range(in_context, number):
        counts[touched[i]] = 0


@part
def _descending_key(value):
    """A 32-bit integer that falls as a float32 rises; both zeros have the same key."""
    bits = np.int64(np.float32(value + np.float32(0)).view(np.int32))
    return (1 << 31) - 1 - bits if bits >= 0 else bits + (1 << 32)


@part
def _crossing_bucket(mass, limit, before):
    """The first bucket at which the mass reaches `limit`, or the last non-empty one, and the mass before it."""
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
def _last_by_weight(x, tokens, weights, limit, before):
    """The last of some tokens, in descending order of their values x, with less weight than `limit` before it.

    The first one always qualifies. `tokens` are in rising order; `before` is the weight of all larger values.
    """
    count = len(x)
    for level in range(3):  # 11, 11 and 10 bits of the key, until all that is left has one value
        shift = 21 if level == 0 else 10 if level == 1 else 0
        mass = np.zeros(2048)
        for i in range(count):
            mass[(_descending_key(x[i]) >> shift) & 2047] += weights[i]
        chosen, before = _crossing_bucket(mass, limit, before)
        remaining = 0
        for i in range(count):
            if (_descending_key(x[i]) >> shift) & 2047 == chosen:
                x[remaining], tokens[remaining], weights[remaining] = x[i], tokens[i], weights[i]
                remaining += 1
        count = remaining
    last = 0
    before += weights[0]
    while last + 1 < count and before < limit:
        last += 1
        before += weights[last]
    return tokens[last]


@part
def _bucket(value, largest, factor):
    """Falling values in rising buckets of equal width; the last one takes all the rest."""
    bucket = (largest - value) * factor
    return np.uint32(bucket if bucket < _BUCKETS - 1 else _BUCKETS - 1)


@part
def _add_masses(x, maxima, blocks, largest, factor, lowest, weights, mass):
    """mass[bucket] += the weights of its tokens, without blocks below `lowest`."""
    for block in range(blocks):
        if maxima[block] >= lowest:
            for token in range(block * LANES, block * LANES + LANES):
                mass[_bucket(x[token], largest, factor)] += weights[token]


@part
def _members(x, maxima, blocks, largest, factor, lowest, chosen, tokens):
    """Writes the tokens of one bucket, in rising order; returns how many."""
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
    """The last token, in falling order of x, that has less weight than `limit` before it.

    The caller knows that it is not below `lowest`, so blocks below that are skipped.
    """
    mass, factor = np.zeros(_BUCKETS), np.float32(_BUCKETS_PER_LOGIT / temperature)
    _add_masses(x, maxima, blocks, np.float32(largest), factor, lowest, weights, mass)
    chosen, before = _crossing_bucket(mass, limit, 0.0)
    tokens = np.empty(len(x), np.int32)
    count = _members(x, maxima, blocks, np.float32(largest), factor, lowest, chosen, tokens)
    values, bucket_weights = np.empty(count, np.float32), np.empty(count)
    for i in range(count):
        values[i], bucket_weights[i] = x[tokens[i]], weights[tokens[i]]
    return _last_by_weight(values, tokens, bucket_weights, limit, before)


@part
def _kth_largest(x, maxima, blocks, k, largest, temperature, weights):
    """The k-th largest value of x; weights are overwritten."""
    lowest = LEAST
    if k <= blocks:  # k blocks hold k values at least as large as the smallest of their maxima
        values, order, ones = np.empty(blocks, np.float32), np.empty(blocks, np.int32), np.empty(blocks)
        for block in range(blocks):
            values[block], order[block], ones[block] = maxima[block], block, 1
        lowest = maxima[_last_by_weight(values, order, ones, np.float64(k), 0.0)]
    for block in range(blocks):
        if maxima[block] >= lowest:
            for token in range(block * LANES, block * LANES + LANES):
                weights[token] = 1
    return x[_last_within(x, maxima, blocks, largest, temperature, lowest, weights, np.float64(k))]


@part
def exponentiate(x, maxima, blocks, scale, least, fine, weights, sums):
    """weights = exp((x - scale[0]) * scale[1]), 0 where x is below `least`; sums of each 16; returns their total.

    Weights are written only for blocks that reach `least`, and of these for the ones that reach `fine`.
    """
    total = 0.0
    for block in range(blocks):
        sums[block] = 0
        if maxima[block] < least:
            continue
        first = block * LANES
        if maxima[block] < fine:
            sums[block] = exp_block_sum(x.ctypes.data + first * _FLOAT, scale.ctypes.data)
        else:
            sums[block] = exp_block(
                x.ctypes.data + first * _FLOAT, scale.ctypes.data, weights.ctypes.data + first * _DOUBLE
            )
            if least > LEAST:
                sums[block] = 0
                for token in range(first, first + LANES):
                    if x[token] < least:
                        weights[token] = 0
                    sums[block] += weights[token]
        total += sums[block]
    return total


@part
def _lower_bound(maxima, blocks, largest, factor, sums, rest):
    """A value below which there is no more weight than `rest`, so that no token there passes top-p."""
    mass, counts = np.zeros(_BUCKETS), np.zeros(_BUCKETS, np.int32)
    below = 0.0  # weight of the blocks that lie in later buckets
    for block in range(blocks):
        bucket = _bucket(maxima[block], largest, factor)
        mass[bucket] += sums[block]
        counts[bucket] += 1
        below += sums[block]
    reaching, weight, step = 0, 1.0, math.exp(-1 / _BUCKETS_PER_LOGIT)
    for bucket in range(_BUCKETS - 1):
        below -= mass[bucket]
        reaching += counts[bucket]
        weight *= step
        if below + (LANES - 1) * reaching * weight <= rest:
            return largest - np.float32(bucket + 2) / factor
    return LEAST


@part
def filter_cutoff(x, maxima, blocks, largest, temperature, top_k, top_p, min_p, weights, sums):
    """The cutoff of all filters: (value, token, floor).

    A token passes if its logit is larger than `value`, or equal and the token not higher, and if its logit over the
    temperature is not below `floor`.
    """
    least, last = LEAST, len(x)
    if top_k > 0:  # tokens that tie with the last all pass
        least = max(_kth_largest(x, maxima, blocks, top_k, largest, temperature, weights), LEAST)
    if top_p < 1:
        scale = np.empty(2)
        scale[0], scale[1] = largest, 1 / temperature
        # Of very light tokens, which can be many, only the sum matters, and only a little: float32 is enough.
        fine = np.float32(largest - _HEAVY * temperature) if top_k == 0 else least
        total = exponentiate(x, maxima, blocks, scale, least, fine, weights, sums)
        lowest = least
        if top_k == 0:
            factor, rest = np.float32(_BUCKETS_PER_LOGIT / temperature), (1 - top_p) * total * (1 - 1e-5)
            lowest = max(_lower_bound(maxima, blocks, np.float32(largest), factor, sums, rest), LEAST)
            for block in range(blocks):
                if lowest <= maxima[block] < fine:
                    first = block * LANES
                    exp_block(x.ctypes.data + first * _FLOAT, scale.ctypes.data, weights.ctypes.data + first * _DOUBLE)
        last = int(_last_within(x, maxima, blocks, largest, temperature, lowest, weights, top_p * total))
        least = max(x[last], LEAST)
    floor = largest / temperature + np.log(min_p) if min_p > 0 else -np.inf
    return least, last, floor


@part
def passes_filters(value, token, cutoff, temperature):
    least, last, floor = cutoff
    if value < least or (value == least and token > last):
        return False
    return floor == -np.inf or value / temperature >= floor
