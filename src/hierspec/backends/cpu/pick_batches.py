"""Picks for the requests of a batch in one call that all threads share: `pick.py` for one request after the other."""

# mypy: allow-untyped-defs
from __future__ import annotations

from numba import types

from hierspec.backends.cpu.compiled import (
    DOUBLES,
    DOUBLES_2D,
    FLOATS_2D,
    INT,
    INT32S,
    INTS,
    INTS_2D,
    calls,
    compiled,
    filter_version,
)
from hierspec.backends.cpu.pick import greedy_rows, sample_rows
from hierspec.backends.cpu.sharing import share

_greedy, _sample = calls(greedy_rows), calls(sample_rows)

# For `sample_rows`: no tokens, no values, no distributions.
_NOTHING = types.Tuple((INT32S, DOUBLES, DOUBLES_2D))


@compiled(
    filter_version,
    INT, INT, INTS, FLOATS_2D, INTS_2D, DOUBLES_2D, INTS_2D, _NOTHING, INTS_2D, DOUBLES,
    seconds=1,
)  # fmt: skip
def pick_batch(thread, threads, addresses, logits, requests, filters, keys, nothing, picks, leads, version=0):
    """Picks for the rows of several requests without penalties or biases.

    requests [n, 3]: first row, end of the rows, top_k. filters [n, 3]: temperature, top_p, min_p. `keys`, `picks` and
    `leads` are by row, as in `sample_rows`. `addresses` are those of `greedy_rows` and `sample_rows`. Every thread
    calls this once with its number and takes neighbouring requests.
    """
    no_tokens, no_values, no_distributions = nothing
    first, last = share(len(requests), thread, threads)
    for request in range(first, last):
        begin, end, top_k = requests[request]
        temperature, top_p, min_p = filters[request]
        if temperature == 0:
            _greedy(
                addresses[0],
                (0, 1, logits[begin:end], logits.shape[1], picks[begin:end], leads[begin:end], no_distributions),
            )
        else:
            _sample(
                addresses[1],
                (
                    0, 1, logits[begin:end], temperature, (top_k, top_p, min_p), (1.0, 0.0, 0.0), no_tokens, 0,
                    no_tokens, no_tokens, no_tokens, no_values, keys[begin:end], picks[begin:end], leads[begin:end],
                    no_distributions,
                ),
            )  # fmt: skip
