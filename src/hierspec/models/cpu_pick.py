"""Picks on a CPU: the best token of a row, with the keyed noise where sampled, in one walk over the vocabulary."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from hierspec.models.vector_code import CODE, LANES, VectorWriter, all_lanes, integers, piece, whole

_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_FLOAT = 4  # bytes
_MOST_NOISE = np.float32(22.25)  # no noise is larger: 31 hashed bits give at least 0.5 / 2**31


@piece(3)
def _best_lanes(w: VectorWriter, values: Any, blocks: Any, out: Any) -> None:
    """out[0:16]: the largest value of each lane over all blocks; out[16:32]: its block, as bits; out[32:48]: 0, or not
    a number where any value is not finite."""

    def one(block: Any, carried: list[Any]) -> list[Any]:
        best, where, broken = carried
        x = w.load(values, w.b.mul(block, whole(LANES)))
        number = w.b.trunc(block, ir.IntType(32))
        single = w.b.insert_element(integers(0), number, ir.Constant(ir.IntType(32), 0))
        spread = w.b.shuffle_vector(single, integers(0), integers(0))
        larger = w.b.fcmp_ordered(">", x, best)
        return [
            w.b.select(larger, x, best),
            w.b.select(larger, spread, where),
            w.fma(x, all_lanes(0.0), broken),
        ]

    start = [all_lanes(float("-inf")), integers(0), all_lanes(0.0)]
    best, where, broken = w.loop(blocks, start, one)
    w.store(best, out, whole(0))
    w.b.store(where, w.at(out, whole(LANES)), align=_FLOAT)
    w.store(broken, out, whole(2 * LANES))


@piece(2, types.float32)
def _block_limit(w: VectorWriter, values: Any, temperature: Any) -> Any:
    """The largest of 16 values over the temperature (the address of a float)."""

    def larger(x: Any, y: Any) -> Any:
        return w.b.select(w.b.fcmp_ordered(">", x, y), x, y)

    factor = w.spread(w.load_one(temperature, whole(0)))
    return w.fold(w.b.fdiv(w.load(values, whole(0)), factor), larger)


@piece(6)
def _noisy(w: VectorWriter, values: Any, temperature: Any, first: Any, low: Any, high: Any, out: Any) -> None:
    """out[0:16] = values / temperature + the noise of tokens first .. first + 15 (`core.sampling.gumbel`)."""
    b = w.b

    def spread(value: Any) -> Any:
        single = b.insert_element(integers(0), b.trunc(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 0))
        return b.shuffle_vector(single, integers(0), integers(0))

    def mix(h: Any) -> Any:
        h = b.mul(b.xor(h, b.lshr(h, integers(16))), integers(0x7FEB352D))
        h = b.mul(b.xor(h, b.lshr(h, integers(15))), integers(0x846CA68B))
        return b.xor(h, b.lshr(h, integers(16)))

    tokens = b.add(spread(first), ir.Constant(_INTEGERS, list(range(LANES))))
    h = b.add(b.mul(tokens, integers(0x9E3779B1)), spread(low))
    h = mix(b.xor(mix(h), spread(high)))
    vector = all_lanes(0.0).type
    u = b.fmul(b.fadd(b.uitofp(b.lshr(h, integers(1)), vector), all_lanes(0.5)), all_lanes(2.0**-31))
    # -log(1 - u): a series where 1 - u would lose the small numbers that make the large noise.
    series = all_lanes(0.2)
    for coefficient in (0.25, 1 / 3, 0.5, 1.0):
        series = w.fma(series, u, all_lanes(coefficient))
    rest = b.fsub(all_lanes(1.0), u)
    some = w.call("llvm.maxnum.v16f32", rest, all_lanes(1e-10))
    waiting = b.select(
        b.fcmp_ordered("<", u, all_lanes(1 / 64)), b.fmul(series, u), b.fsub(all_lanes(0.0), w.log(some))
    )
    noise = b.fsub(all_lanes(0.0), w.log(waiting))
    scaled = b.fdiv(w.load(values, whole(0)), w.spread(w.load_one(temperature, whole(0))))
    w.store(b.fadd(scaled, noise), out, whole(0))


@njit(nogil=True, cache=True, error_model="numpy")
def best_tokens(logits, temperature, keys, found, code=CODE):
    """found[row] = the pick of each row of logits [rows, vocabulary], -1 where they are not numbers.

    keys [rows, 2] are `noise_keys` of each row's position; at temperature 0 they do not matter. Of equal scores the
    lowest token wins.
    """
    rows, vocabulary = logits.shape
    lanes = np.empty(3 * LANES, np.float32)
    blocks_of_lanes = lanes.view(np.int32)
    scores = np.empty(LANES, np.float32)
    scale = np.array([temperature], np.float32)
    for row in range(rows):
        start = logits.ctypes.data + row * vocabulary * _FLOAT
        _best_lanes(start, vocabulary // LANES, lanes.ctypes.data)
        token, best, fine = -1, np.float32(-np.inf), True
        for lane in range(LANES):
            candidate = blocks_of_lanes[LANES + lane] * LANES + lane
            if lanes[lane] > best or (lanes[lane] == best and candidate < token):
                token, best = candidate, lanes[lane]
            fine = fine and lanes[2 * LANES + lane] == 0
        if not fine:
            found[row] = -1
            continue
        if temperature > 0:
            # Start with the likeliest token's own score: most blocks cannot reach it with any noise and are left out.
            at = token // LANES * LANES
            _noisy(start + at * _FLOAT, scale.ctypes.data, at, keys[row, 0], keys[row, 1], scores.ctypes.data)
            best = scores[token - at]
            for block in range(vocabulary // LANES):
                here = start + block * LANES * _FLOAT
                if _block_limit(here, scale.ctypes.data) + _MOST_NOISE < best:
                    continue
                _noisy(here, scale.ctypes.data, block * LANES, keys[row, 0], keys[row, 1], scores.ctypes.data)
                for lane in range(LANES):
                    candidate = block * LANES + lane
                    if scores[lane] > best or (scores[lane] == best and candidate < token):
                        token, best = candidate, scores[lane]
        found[row] = token
