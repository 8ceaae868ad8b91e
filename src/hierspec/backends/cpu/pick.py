"""Picks and distributions on a CPU, compiled: `core/sampling.py` for rows of logits, in few passes over them.

Results are those of float64. Float32 vectors only rule tokens out: a token needs enough noise to beat the best score so
far, and the hashed bits behind its noise show cheaply whether it has that much.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from hierspec.backends.cpu.compiled import (
    DOUBLE,
    DOUBLES,
    DOUBLES_2D,
    FLOATS_2D,
    INT,
    INT32S,
    INTS_2D,
    TRIPLE,
    compiled,
    filter_version,
    part,
)
from hierspec.backends.cpu.exponentials import block_maxima, reduce_lanes
from hierspec.backends.cpu.filters import adjust, count_tokens, exponentiate, filter_cutoff, passes_filters
from hierspec.backends.cpu.llvm import LANES, V16F32, V16I32, VectorWriter, i64, kernel, splat_f32, splat_i32

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOAT = 4  # bytes
_MAX_NOISE = 22.25  # 31 hashed bits give a uniform number of at least 0.5 / 2**31
_MIN_TEMPERATURE = 1e-30  # below it nothing changes


def _splat_low_half(w: VectorWriter, value: Any) -> Any:
    """Broadcasts the lower half of an int64 to all lanes."""
    single = w.b.insert_element(splat_i32(0), w.b.trunc(value, _I32), ir.Constant(_I32, 0))
    return w.b.shuffle_vector(single, splat_i32(0), splat_i32(0))


def _hash_tokens(w: VectorWriter, first: Any, low: Any, high: Any) -> Any:
    """The hashed 32 bits behind the noise of tokens first .. first + 15."""
    b = w.b

    def mix(h: Any) -> Any:
        h = b.mul(b.xor(h, b.lshr(h, splat_i32(16))), splat_i32(0x7FEB352D))
        h = b.mul(b.xor(h, b.lshr(h, splat_i32(15))), splat_i32(0x846CA68B))
        return b.xor(h, b.lshr(h, splat_i32(16)))

    tokens = b.add(_splat_low_half(w, first), ir.Constant(V16I32, list(range(LANES))))
    h = b.add(b.mul(tokens, splat_i32(0x9E3779B1)), _splat_low_half(w, low))
    return mix(b.xor(mix(h), _splat_low_half(w, high)))


@kernel(3, types.int64)
def _bit_limits(w: VectorWriter, maxima: Any, settings: Any, out: Any) -> Any:
    """out[j]: how small the 31 hashed bits of a token of block j must be for it to matter; -1 if no token can.

    Returns the largest of them. maxima [16]: the blocks' largest values; settings: the row's largest value,
    1 / temperature, the score to beat, the smallest value that passes the filters.
    """
    b = w.b
    largest, factor, goal, least = (w.splat(w.load_float(settings, i64(index))) for index in range(4))
    values = w.load(maxima, i64(0))
    lacking = b.fsub(goal, b.fmul(b.fsub(values, largest), factor))
    # Noise above d needs a uniform number below 1 - exp(-exp(-d)), which is below exp(-d).
    probability = w.call("llvm.minnum.v16f32", w.exp(b.fsub(splat_f32(-0.0), lacking)), splat_f32(0.999))
    bits = b.fptosi(w.fma(probability, splat_f32(1.00001 * 2.0**31), splat_f32(1.0)), V16I32)
    bits = b.select(b.fcmp_unordered("<", lacking, splat_f32(0.002)), splat_i32(0x7FFFFFFF), bits)
    hopeless = b.or_(b.fcmp_ordered(">", lacking, splat_f32(_MAX_NOISE)), b.fcmp_unordered("<", values, least))
    bits = b.select(hopeless, splat_i32(-1), bits)
    b.store(bits, w.at(out, i64(0)), align=_FLOAT)
    return b.sext(reduce_lanes(w, "smax", bits), _I64)


@kernel(3, types.int64)
def _smallest_bits(w: VectorWriter, first: Any, low: Any, high: Any) -> Any:
    """The smallest 31 hashed bits of 16 tokens: those of the largest noise."""
    return w.b.zext(w.b.lshr(reduce_lanes(w, "umin", _hash_tokens(w, first, low, high)), ir.Constant(_I32, 1)), _I64)


@kernel(6)
def _add_noise(w: VectorWriter, values: Any, settings: Any, first: Any, low: Any, high: Any, out: Any) -> None:
    """out[0:16] = (values - the row's largest) / temperature + the noise of tokens first .. first + 15."""
    b = w.b
    h = _hash_tokens(w, first, low, high)

    def uniform(bits: Any) -> Any:
        return b.fmul(b.fadd(b.uitofp(bits, V16F32), splat_f32(0.5)), splat_f32(2.0**-31))

    u = uniform(b.lshr(h, splat_i32(1)))
    rest = uniform(b.lshr(b.not_(h), splat_i32(1)))  # 1 - u, but precise where u is almost 1
    # -log(1 - u): a series for small u, where the logarithm would lose the digits that make large noise.
    series = splat_f32(0.2)
    for coefficient in (0.25, 1 / 3, 0.5, 1.0):
        series = w.fma(series, u, splat_f32(coefficient))
    exponential = b.select(
        b.fcmp_ordered("<", u, splat_f32(1 / 64)), b.fmul(series, u), b.fsub(splat_f32(0.0), w.log(rest))
    )
    noise = b.fsub(splat_f32(0.0), w.log(exponential))
    largest, factor = (w.splat(w.load_float(settings, i64(index))) for index in range(2))
    w.store(b.fadd(b.fmul(b.fsub(w.load(values, i64(0)), largest), factor), noise), out, i64(0))


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
def _insert(token, score, picks, scores):
    """Inserts a token among the best, best first; of equal scores the lowest token first."""
    rank = len(picks)
    while rank > 0 and (score > scores[rank - 1] or (score == scores[rank - 1] and token < picks[rank - 1])):
        rank -= 1
    for i in range(len(picks) - 1, rank, -1):
        picks[i], scores[i] = picks[i - 1], scores[i - 1]
    if rank < len(picks):
        picks[rank], scores[rank] = token, score


@part
def _pick_largest(x, maxima, blocks, picks, scores):
    """Temperature 0: the tokens of the largest values."""
    for block in range(blocks):
        if maxima[block] > scores[-1]:
            for token in range(block * LANES, block * LANES + LANES):
                if x[token] > scores[-1]:
                    _insert(token, np.float64(x[token]), picks, scores)


@part
def _insert_block(block, x, largest, temperature, cutoff, low, high, settings, picks, scores):
    """Inserts the tokens of one block that pass the filters and whose scores may be among the best."""
    noisy = np.empty(LANES, np.float32)
    address = x.ctypes.data + block * LANES * _FLOAT
    _add_noise(address, settings.ctypes.data, block * LANES, low, high, noisy.ctypes.data)
    for lane in range(LANES):
        token = block * LANES + lane
        if noisy[lane] >= settings[2] and passes_filters(x[token], token, cutoff, temperature):
            score = (np.float64(x[token]) - largest) / temperature + _noise(token, low, high)
            _insert(token, score, picks, scores)
            settings[2] = scores[-1] - 1e-4 - 1e-6 * abs(scores[-1])  # the error of float32


@part
def _sample(x, maxima, blocks, largest, temperature, cutoff, low, high, picks, scores):
    """Temperature above 0: the tokens of the largest scores among those that pass the filters."""
    least, _, floor = cutoff
    settings = np.empty(4, np.float32)
    settings[0], settings[1], settings[2], settings[3] = largest, 1 / temperature, -np.inf, least
    if floor > -np.inf:  # a little below the floor, to allow for rounding
        lowest = floor * temperature
        settings[3] = max(least, np.float32(lowest - 1e-6 * (abs(lowest) + abs(largest))))
    likeliest = 0
    while maxima[likeliest] != largest:
        likeliest += 1
    # Start with the block of the most likely token: its score rules out most others.
    _insert_block(likeliest, x, largest, temperature, cutoff, low, high, settings, picks, scores)
    limits = np.empty(LANES, np.int32)
    for page in range(0, blocks, LANES):
        if _bit_limits(maxima.ctypes.data + page * _FLOAT, settings.ctypes.data, limits.ctypes.data) < 0:
            continue
        for lane in range(LANES):
            block = page + lane
            if limits[lane] < 0 or _smallest_bits(block * LANES, low, high) > limits[lane]:
                continue
            if block != likeliest:
                _insert_block(block, x, largest, temperature, cutoff, low, high, settings, picks, scores)


@part
def _distribution(x, maxima, blocks, temperature, cutoff, weights, distribution):
    """The weights of the tokens that pass the filters, normalised to sum 1."""
    least, total = cutoff[0], 0.0
    for block in range(blocks):
        any_pass = maxima[block] >= least
        for token in range(block * LANES, min(block * LANES + LANES, len(distribution))):
            distribution[token] = 0
            if any_pass and passes_filters(x[token], token, cutoff, temperature):
                distribution[token] = weights[token]
                total += weights[token]
    factor = 1 / total
    for token in range(len(distribution)):
        distribution[token] *= factor


@part
def _fill(picks, scores):
    """If fewer tokens are possible than were requested, adds the lowest of the others."""
    count, token = 0, 0
    while count < len(picks) and scores[count] > -np.inf:
        count += 1
    while count < len(picks):
        taken = False
        for i in range(count):
            taken = taken or picks[i] == token
        if not taken:
            picks[count] = token
            count += 1
        token += 1


@part
def greedy_row(x, vocabulary, maxima, scores, picks):
    """One row of `greedy_rows`; returns its lead."""
    blocks = len(x) // LANES
    picks[0] = -1
    if not np.isfinite(block_maxima(x.ctypes.data, blocks, maxima.ctypes.data)):
        return 0.0
    for rank in range(len(scores)):
        picks[rank], scores[rank] = vocabulary, -np.inf
    _pick_largest(x, maxima, blocks, picks, scores)
    lead = scores[0] - scores[min(1, len(scores) - 1)]
    _fill(picks, scores)
    return lead


@compiled(
    filter_version,
    INT, INT, FLOATS_2D, INT, INTS_2D, DOUBLES, DOUBLES_2D,
    seconds=1.5,
)  # fmt: skip
def greedy_rows(thread, threads, logits, vocabulary, picks, leads, distributions, version=0):
    """`sample_rows` at temperature 0, for rows that are padded to whole blocks with -inf."""
    maxima, scores = np.empty(logits.shape[1] // LANES, np.float32), np.empty(picks.shape[1])
    for row in range(thread, len(logits), threads):
        lead = greedy_row(logits[row], vocabulary, maxima, scores, picks[row])
        if len(distributions):
            for token in range(vocabulary):
                distributions[row, token] = token == picks[row, 0]
        elif len(leads):
            leads[row] = lead


@compiled(
    filter_version,
    FLOATS_2D, TRIPLE, INT32S, INT, INT32S, INT32S, INT32S, DOUBLES, FLOATS_2D,
    seconds=2,
)  # fmt: skip
def adjust_rows(logits, penalties, context, prompt, tokens, parents, bias_tokens, bias_values, out, version=0):
    """out [rows, blocks * 16] = logits with penalties and bias, padded with -inf. Arguments as of `sample_rows`."""
    vocabulary, penalised = logits.shape[1], len(context) > 0
    counts = np.zeros(vocabulary, np.int32)
    touched = np.empty(vocabulary + 1 if penalised else 0, np.int32)
    number = count_tokens(context, prompt, penalties[0], counts, touched) if penalised else 0
    for row in range(len(logits)):
        node = row - 1 if penalised else -1
        x = logits[row]
        adjust(x, node, tokens, parents, counts, touched, number, penalties, bias_tokens, bias_values, out[row])


@compiled(
    filter_version,
    INT, INT, FLOATS_2D, DOUBLE, types.Tuple((INT, DOUBLE, DOUBLE)), TRIPLE, INT32S, INT, INT32S, INT32S, INT32S,
    DOUBLES, INTS_2D, INTS_2D, DOUBLES, DOUBLES_2D,
    seconds=7,
)  # fmt: skip
def sample_rows(
    thread,
    threads,
    logits,
    temperature,
    filters,
    penalties,
    context,
    prompt,
    tokens,
    parents,
    bias_tokens,
    bias_values,
    keys,
    picks,
    leads,
    distributions,
    version=0,
):
    """picks [rows, candidates] for logits [rows, vocabulary], or distributions [rows, vocabulary] if that has rows.

    picks[row, 0] = -1: the logits are not finite. leads [rows], if it has rows: by how much the best score beats the
    second best.

    filters: top_k (0: none), top_p, min_p. penalties: repetition, presence, frequency; `context` is empty if there are
    none. tokens and parents are the proposal's; keys [rows, 2] are `noise_keys` of each row's position. Threads share
    the rows; rows do not affect each other.
    """
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // LANES)
    size = blocks * LANES
    maxima = np.empty(-(-blocks // LANES) * LANES, np.float32)
    for block in range(blocks, len(maxima)):
        maxima[block] = -np.inf
    scores = np.empty(picks.shape[1])
    top_k, top_p, min_p = filters
    top_k = top_k if top_k < vocabulary else 0
    bounded = max(temperature, _MIN_TEMPERATURE)
    penalised = len(context) > 0
    changed = penalised or len(bias_tokens) > 0 or size != vocabulary
    counts = np.zeros(vocabulary if changed else 0, np.int32)
    touched = np.empty(vocabulary + 1 if penalised else 0, np.int32)
    number = count_tokens(context, prompt, penalties[0], counts, touched) if penalised else 0
    adjusted = np.empty(size if changed else 0, np.float32)
    weights = np.empty(size if top_k > 0 or top_p < 1 or len(distributions) else 0)
    sums = np.empty(blocks)
    for row in range(thread, rows, threads):
        x = logits[row]
        if changed:
            node = row - 1 if penalised else -1
            adjust(x, node, tokens, parents, counts, touched, number, penalties, bias_tokens, bias_values, adjusted)
            x = adjusted
        largest = block_maxima(x.ctypes.data, blocks, maxima.ctypes.data)
        picks[row, 0] = -1
        if not np.isfinite(largest):
            continue
        for rank in range(len(scores)):
            picks[row, rank], scores[rank] = vocabulary, -np.inf
        cutoff = filter_cutoff(x, maxima, blocks, np.float64(largest), bounded, top_k, top_p, min_p, weights, sums)
        if len(distributions):
            if top_p == 1:
                scale = np.empty(2)
                scale[0], scale[1] = largest, 1 / bounded
                exponentiate(x, maxima, blocks, scale, cutoff[0], cutoff[0], weights, sums)
            _distribution(x, maxima, blocks, bounded, cutoff, weights, distributions[row])
            continue
        low, high = keys[row]
        _sample(x, maxima, blocks, np.float64(largest), bounded, cutoff, low, high, picks[row], scores)
        if len(leads):
            leads[row] = scores[0] - scores[min(1, len(scores) - 1)]
        _fill(picks[row], scores)
