"""Picks and laws on a CPU, compiled: what `core/sampling.py` does for one row, in a few walks over the vocabulary.

The answers are those of float64. Vectors of float32 only tell which tokens are out of reach: a token needs noise to
overtake the best one found so far, and the bits that its noise is made of show at once whether it has that much.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from hierspec.backends.cpu.exponentials import block_maxima, reduced
from hierspec.backends.cpu.filters import FILTER_CODE, adjust, count_tokens, is_kept, last_kept, part, weigh
from hierspec.backends.cpu.llvm import LANES, VectorWriter, all_lanes, integers, piece, whole

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_INTEGERS = ir.VectorType(_I32, LANES)
_FLOAT = 4  # bytes
_MOST_NOISE = 22.25  # no noise is larger: 31 hashed bits give at least 0.5 / 2**31
_COLDEST = 1e-30  # below this temperature nothing changes any more


def _spread(w: VectorWriter, value: Any) -> Any:
    """The lower half of a whole number in all lanes."""
    single = w.b.insert_element(integers(0), w.b.trunc(value, _I32), ir.Constant(_I32, 0))
    return w.b.shuffle_vector(single, integers(0), integers(0))


def _hashed(w: VectorWriter, first: Any, low: Any, high: Any) -> Any:
    """The 32 bits behind the noise of tokens first .. first + 15."""
    b = w.b

    def mix(h: Any) -> Any:
        h = b.mul(b.xor(h, b.lshr(h, integers(16))), integers(0x7FEB352D))
        h = b.mul(b.xor(h, b.lshr(h, integers(15))), integers(0x846CA68B))
        return b.xor(h, b.lshr(h, integers(16)))

    tokens = b.add(_spread(w, first), ir.Constant(_INTEGERS, list(range(LANES))))
    h = b.add(b.mul(tokens, integers(0x9E3779B1)), _spread(w, low))
    return mix(b.xor(mix(h), _spread(w, high)))


@piece(3, types.int64)
def _reaches(w: VectorWriter, maxima: Any, settings: Any, out: Any) -> Any:
    """out[j]: how small 31 hashed bits must be for a token of block j to matter, -1 where none can; the largest.

    maxima [16]: the blocks' largest values; settings: the row's largest, 1 / temperature, the score to be reached,
    the least value that is kept.
    """
    b = w.b
    largest, factor, goal, least = (w.spread(w.load_one(settings, whole(index))) for index in range(4))
    values = w.load(maxima, whole(0))
    lacking = b.fsub(goal, b.fmul(b.fsub(values, largest), factor))
    # Noise above d takes a uniform number below 1 - exp(-exp(-d)), which is below exp(-d).
    chance = w.call("llvm.minnum.v16f32", w.exp(b.fsub(all_lanes(-0.0), lacking)), all_lanes(0.999))
    bits = b.fptosi(w.fma(chance, all_lanes(1.00001 * 2.0**31), all_lanes(1.0)), _INTEGERS)
    bits = b.select(b.fcmp_unordered("<", lacking, all_lanes(0.002)), integers(0x7FFFFFFF), bits)
    hopeless = b.or_(b.fcmp_ordered(">", lacking, all_lanes(_MOST_NOISE)), b.fcmp_unordered("<", values, least))
    bits = b.select(hopeless, integers(-1), bits)
    b.store(bits, w.at(out, whole(0)), align=_FLOAT)
    return b.sext(reduced(w, "smax", bits), _I64)


@piece(3, types.int64)
def _smallest_bits(w: VectorWriter, first: Any, low: Any, high: Any) -> Any:
    """The smallest 31 bits behind the noise of 16 tokens: those of the largest noise."""
    return w.b.zext(w.b.lshr(reduced(w, "umin", _hashed(w, first, low, high)), ir.Constant(_I32, 1)), _I64)


@piece(6)
def _noisy(w: VectorWriter, values: Any, settings: Any, first: Any, low: Any, high: Any, out: Any) -> None:
    """out[0:16] = (values - the row's largest) / temperature + the noise of tokens first .. first + 15."""
    b = w.b
    h = _hashed(w, first, low, high)

    def uniform(bits: Any) -> Any:
        return b.fmul(b.fadd(b.uitofp(bits, all_lanes(0.0).type), all_lanes(0.5)), all_lanes(2.0**-31))

    u = uniform(b.lshr(h, integers(1)))
    rest = uniform(b.lshr(b.not_(h), integers(1)))  # 1 - u, but precise where u is almost 1
    # -log(1 - u): a series where that would lose the small numbers that make the large noise.
    series = all_lanes(0.2)
    for coefficient in (0.25, 1 / 3, 0.5, 1.0):
        series = w.fma(series, u, all_lanes(coefficient))
    waiting = b.select(
        b.fcmp_ordered("<", u, all_lanes(1 / 64)), b.fmul(series, u), b.fsub(all_lanes(0.0), w.log(rest))
    )
    noise = b.fsub(all_lanes(0.0), w.log(waiting))
    largest, factor = (w.spread(w.load_one(settings, whole(index))) for index in range(2))
    w.store(b.fadd(b.fmul(b.fsub(w.load(values, whole(0)), largest), factor), noise), out, whole(0))


@part
def _mix(h):
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ (h >> 16)


@part
def _noise(token, low, high):
    """`core.sampling.gumbel` of one token."""
    h = _mix(_mix((token * 0x9E3779B1 + low) & 0xFFFFFFFF) ^ high)
    return -np.log(-np.log1p(-((h >> 1) + 0.5) / 2**31))


@part
def _enter(token, score, found, scores):
    """Put a token among the best, best first; of equal scores the lowest token first."""
    place = len(found)
    while place > 0 and (score > scores[place - 1] or (score == scores[place - 1] and token < found[place - 1])):
        place -= 1
    for i in range(len(found) - 1, place, -1):
        found[i], scores[i] = found[i - 1], scores[i - 1]
    if place < len(found):
        found[place], scores[place] = token, score


@part
def _largest_of(x, maxima, blocks, found, scores):
    """Temperature 0: the tokens of the largest values."""
    for block in range(blocks):
        if maxima[block] > scores[-1]:
            for token in range(block * LANES, block * LANES + LANES):
                if x[token] > scores[-1]:
                    _enter(token, np.float64(x[token]), found, scores)


@part
def _consider(block, x, largest, temperature, end, low, high, settings, found, scores):
    """Enter the tokens of one block that are kept and whose scores may be among the best."""
    least, last, floor = end
    noisy = np.empty(LANES, np.float32)
    address = x.ctypes.data + block * LANES * _FLOAT
    _noisy(address, settings.ctypes.data, block * LANES, low, high, noisy.ctypes.data)
    for lane in range(LANES):
        token = block * LANES + lane
        if noisy[lane] >= settings[2] and is_kept(x[token], token, least, last, temperature, floor):
            score = (np.float64(x[token]) - largest) / temperature + _noise(token, low, high)
            _enter(token, score, found, scores)
            settings[2] = scores[-1] - 1e-4 - 1e-6 * abs(scores[-1])  # float32 may be wrong by this much


@part
def _draw(x, maxima, blocks, largest, temperature, end, low, high, found, scores):
    """Temperature above 0: the tokens of the largest scores among those that are kept."""
    least, _, floor = end
    settings = np.empty(4, np.float32)
    settings[0], settings[1], settings[2], settings[3] = largest, 1 / temperature, -np.inf, least
    if floor > -np.inf:  # a little below what the floor comes to
        lowest = floor * temperature
        settings[3] = max(least, np.float32(lowest - 1e-6 * (abs(lowest) + abs(largest))))
    likeliest = 0
    while maxima[likeliest] != largest:
        likeliest += 1
    # First the block of the likeliest token: with its score known most others are out of reach.
    _consider(likeliest, x, largest, temperature, end, low, high, settings, found, scores)
    limits = np.empty(LANES, np.int32)
    for page in range(0, blocks, LANES):
        if _reaches(maxima.ctypes.data + page * _FLOAT, settings.ctypes.data, limits.ctypes.data) < 0:
            continue
        for place in range(LANES):
            block = page + place
            if limits[place] < 0 or _smallest_bits(block * LANES, low, high) > limits[place]:
                continue
            if block != likeliest:
                _consider(block, x, largest, temperature, end, low, high, settings, found, scores)


@part
def _distribution(x, maxima, blocks, temperature, end, weights, distribution):
    """The weights of what is kept, with sum 1."""
    least, last, floor = end
    total = 0.0
    for block in range(blocks):
        some = maxima[block] >= least
        for token in range(block * LANES, min(block * LANES + LANES, len(distribution))):
            distribution[token] = 0
            if some and is_kept(x[token], token, least, last, temperature, floor):
                distribution[token] = weights[token]
                total += weights[token]
    share = 1 / total
    for token in range(len(distribution)):
        distribution[token] *= share


@part
def _fill(found, scores):
    """Where fewer tokens are possible than were asked for: the lowest of the others."""
    number, token = 0, 0
    while number < len(found) and scores[number] > -np.inf:
        number += 1
    while number < len(found):
        taken = False
        for i in range(number):
            taken = taken or found[i] == token
        if not taken:
            found[number] = token
            number += 1
        token += 1


@njit(nogil=True, cache=True, error_model="numpy")
def answer_rows(
    thread, threads, logits, temperature, filters, penalties, context, prompt, tokens, parents, bias_tokens,
    bias_values, keys, found, leads, distributions, code=FILTER_CODE,
):  # fmt: skip
    """found [rows, candidates] = the picks of each row of logits [rows, vocabulary], or laws [rows, vocabulary] where
    that has rows. found[row, 0] = -1: the logits are not numbers. leads [rows], where it has rows: how far the best
    score is ahead of the second.

    filters: top_k (0: none), top_p, min_p. penalties: repetition, presence, frequency; `context` is empty where there
    are none. tokens and parents are the proposal's; keys [rows, 2] are `noise_keys` of each row's position. Threads
    share the rows; no row sees another.
    """
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // LANES)
    size = blocks * LANES
    maxima = np.empty(-(-blocks // LANES) * LANES, np.float32)
    for block in range(blocks, len(maxima)):
        maxima[block] = -np.inf
    scores = np.empty(found.shape[1])
    top_k, top_p, min_p = filters
    top_k = top_k if top_k < vocabulary and temperature > 0 else 0
    penalised = len(context) > 0
    changed = penalised or len(bias_tokens) > 0 or size != vocabulary
    counts = np.zeros(vocabulary if changed else 0, np.int32)
    touched = np.empty(vocabulary + 1 if penalised else 0, np.int32)
    number = count_tokens(context, prompt, penalties[0], counts, touched) if penalised else 0
    adjusted = np.empty(size if changed else 0, np.float32)
    weights = np.empty(size if temperature > 0 and (top_k > 0 or top_p < 1 or len(distributions)) else 0)
    sums = np.empty(blocks)
    for row in range(thread, rows, threads):
        x = logits[row]
        if changed:
            node = row - 1 if penalised else -1
            adjust(x, node, tokens, parents, counts, touched, number, penalties, bias_tokens, bias_values, adjusted)
            x = adjusted
        largest = block_maxima(x.ctypes.data, blocks, maxima.ctypes.data)
        found[row, 0] = -1
        if not np.isfinite(largest):
            continue
        for place in range(len(scores)):
            found[row, place], scores[place] = vocabulary, -np.inf
        if temperature > 0:
            heat = max(temperature, _COLDEST)
            end = last_kept(x, maxima, blocks, np.float64(largest), heat, top_k, top_p, min_p, weights, sums)
            if len(distributions):
                if top_p == 1:
                    scale = np.empty(2)
                    scale[0], scale[1] = largest, 1 / heat
                    weigh(x, maxima, blocks, scale, end[0], end[0], weights, sums)
                _distribution(x, maxima, blocks, heat, end, weights, distributions[row])
                continue
            low, high = keys[row]
            _draw(x, maxima, blocks, np.float64(largest), heat, end, low, high, found[row], scores)
        else:
            _largest_of(x, maxima, blocks, found[row], scores)
            if len(distributions):
                for token in range(vocabulary):
                    distributions[row, token] = token == found[row, 0]
                continue
        if len(leads):
            leads[row] = scores[0] - scores[min(1, len(scores) - 1)]
        _fill(found[row], scores)


def best_tokens(logits: np.ndarray, temperature: float, keys: np.ndarray, found: np.ndarray) -> None:
    """found [rows] = the picks where nothing but temperature stands between logits and tokens."""
    tokens, picks = np.empty(0, np.int32), np.empty((len(logits), 1), np.int64)
    answer_rows(
        0, 1, logits, float(temperature), (0, 1.0, 0.0), (1.0, 0.0, 0.0), tokens, 0, tokens, tokens, tokens,
        np.empty(0), keys, picks, np.empty(0), np.empty((0, logits.shape[1])),
    )  # fmt: skip
    found[:] = picks[:, 0]
