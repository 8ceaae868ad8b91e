"""Searches a corpus (see corpus.py) for the end of a context, and copies what followed."""

from __future__ import annotations

from typing import Any

import numpy as np

from hierspec.compiled import compiled


@compiled
def signed(numbers: np.ndarray, index: int) -> int:
    """numbers[index] as int64: numba makes a float of unsigned minus signed."""
    number: Any = np.int64(numbers[index])
    return number


@compiled
def _match_length(tokens: np.ndarray, position: int, tail: np.ndarray, length: int, longest: int) -> int:
    """How many tokens before `position` equal the last of `tail`, at most `longest`, when `length` of them do."""
    while length < longest:
        compared = position - 1 - length
        if compared < 0 or compared >= tokens.size or signed(tokens, compared) != tail[tail.size - 1 - length]:
            break  # outside the text: only in a damaged file
        length += 1
    return length


@compiled
def _insertion(tokens: np.ndarray, order: np.ndarray, tail: np.ndarray) -> tuple[int, int, int]:
    """The first entry not sorted before `tail`, and the match lengths of the entry left of it and of itself."""
    low, high = 0, order.size
    left, right = 0, 0
    while low < high:
        middle = (low + high) // 2
        position = signed(order, middle)
        length = _match_length(tokens, position, tail, min(left, right), tail.size)
        compared = position - 1 - length
        inside = length < tail.size and 0 <= compared < tokens.size
        if inside and signed(tokens, compared) < tail[tail.size - 1 - length]:
            low, left = middle + 1, length
        else:
            high, right = middle, length
    return low, left, right


@compiled
def _run_length(
    tokens: np.ndarray, order: np.ndarray, tail: np.ndarray, length: int, start: int, direction: int, limit: int
) -> int:
    """How many entries from `start` on, at most `limit`, match `length` tokens: galloping, then binary search."""
    matching, beyond, step = 0, limit + 1, 1
    while matching + 1 < beyond:
        probe = min(matching + step, beyond - 1)
        if _match_length(tokens, signed(order, start + direction * (probe - 1)), tail, 0, length) == length:
            matching = probe
        else:
            beyond = probe
        step = 2 * step if beyond > limit else max(1, (beyond - matching) // 2)
    return matching


@compiled
def _copy(tokens: np.ndarray, position: int, vocabulary: int, row: np.ndarray) -> None:
    """Copies the tokens from `position` up to a separator or until the row is full; -1 ends them."""
    column = 0
    while column + 1 < row.size and position + column < tokens.size:
        token = signed(tokens, position + column)
        if token >= vocabulary:
            break
        row[column] = token
        column += 1
    row[column] = -1


@compiled
def find(
    shards: tuple[np.ndarray, ...],
    orders: tuple[np.ndarray, ...],
    tail: np.ndarray,
    shortest: int,
    enough: int,
    vocabulary: int,
    continuations: np.ndarray,
    lengths: np.ndarray,
) -> int:
    """The longest matches of `tail`, then shorter ones until there are `enough`; returns their number.

    Fills a row of `continuations` with what follows each match (-1 ends it), and `lengths` with the match lengths.
    """
    # Entries [low, high) of each shard have been used; left and right are the match lengths of the next ones outside.
    low, high = np.zeros(len(orders), np.int64), np.zeros(len(orders), np.int64)
    left, right = np.zeros(len(orders), np.int64), np.zeros(len(orders), np.int64)
    # Runs of entries with the current length: one to the left and one to the right in every shard.
    starts, sizes = np.zeros(2 * len(orders), np.int64), np.zeros(2 * len(orders), np.int64)
    length = 0
    for shard in range(len(orders)):
        low[shard], left[shard], right[shard] = _insertion(shards[shard], orders[shard], tail)
        high[shard] = low[shard]
        length = max(length, left[shard], right[shard])
    count = 0
    while count < enough and length >= shortest:
        total, shorter = 0, 0
        for shard in range(len(orders)):
            tokens, order = shards[shard], orders[shard]
            sizes[2 * shard] = sizes[2 * shard + 1] = 0
            if left[shard] >= length:
                size = _run_length(tokens, order, tail, length, low[shard] - 1, -1, low[shard])
                low[shard] -= size
                starts[2 * shard], sizes[2 * shard] = low[shard], size
                left[shard] = 0
                if low[shard] > 0:
                    left[shard] = _match_length(tokens, signed(order, low[shard] - 1), tail, 0, length)
            if right[shard] >= length:
                size = _run_length(tokens, order, tail, length, high[shard], 1, order.size - high[shard])
                starts[2 * shard + 1], sizes[2 * shard + 1] = high[shard], size
                high[shard] += size
                right[shard] = 0
                if high[shard] < order.size:
                    right[shard] = _match_length(tokens, signed(order, high[shard]), tail, 0, length)
            total += sizes[2 * shard] + sizes[2 * shard + 1]
            shorter = max(shorter, left[shard], right[shard])
        sampled = min(total, lengths.size - count)
        run, passed = 0, 0
        for number in range(sampled):
            chosen = number * total // sampled  # evenly spaced over all runs
            while chosen >= passed + sizes[run]:
                passed += sizes[run]
                run += 1
            position = signed(orders[run // 2], starts[run] + chosen - passed)
            _copy(shards[run // 2], position, vocabulary, continuations[count + number])
            lengths[count + number] = length
        count += sampled
        if shorter >= length:
            break  # only in a damaged file
        length = shorter
    return count
