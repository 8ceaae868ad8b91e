"""Search in a corpus (see corpus.py): where the end of a context stood before, and what followed there."""

from __future__ import annotations

from typing import Any

import numpy as np

from hierspec.stores.compiled import compiled


@compiled
def signed(numbers: np.ndarray, index: int) -> int:
    """numbers[index]; compiled code takes the difference of unsigned and signed numbers for a fraction."""
    number: Any = np.int64(numbers[index])
    return number


@compiled
def _common(tokens: np.ndarray, place: int, tail: np.ndarray, known: int, most: int) -> int:
    """How many tokens before `place` are the last of `tail`, at most `most`, when `known` of them are."""
    while known < most:
        at = place - 1 - known
        if at < 0 or at >= tokens.size or signed(tokens, at) != tail[tail.size - 1 - known]:
            break  # outside the text: only a damaged file leads there
        known += 1
    return known


@compiled
def _insertion(tokens: np.ndarray, order: np.ndarray, tail: np.ndarray) -> tuple[int, int, int]:
    """The first entry that is not before `tail`; tokens in common with the entry left of it, and with itself."""
    low, high = 0, order.size
    left, right = 0, 0
    while low < high:
        middle = (low + high) // 2
        place = signed(order, middle)
        common = _common(tokens, place, tail, min(left, right), tail.size)
        at = place - 1 - common
        if common < tail.size and 0 <= at < tokens.size and signed(tokens, at) < tail[tail.size - 1 - common]:
            low, left = middle + 1, common
        else:
            high, right = middle, common
    return low, left, right


@compiled
def _reach(
    tokens: np.ndarray, order: np.ndarray, tail: np.ndarray, length: int, start: int, direction: int, limit: int
) -> int:
    """How many entries from `start` on, at most `limit`, have `length` tokens in common: leaps, then halving."""
    known, beyond, step = 0, limit + 1, 1
    while known + 1 < beyond:
        probe = min(known + step, beyond - 1)
        if _common(tokens, signed(order, start + direction * (probe - 1)), tail, 0, length) == length:
            known = probe
        else:
            beyond = probe
        step = 2 * step if beyond > limit else max(1, (beyond - known) // 2)
    return known


@compiled
def _copy(tokens: np.ndarray, place: int, vocabulary: int, row: np.ndarray) -> None:
    """What stands from `place` on, up to a separator and as far as there is room for the -1 that ends it."""
    column = 0
    while column + 1 < row.size and place + column < tokens.size:
        token = signed(tokens, place + column)
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
    copied: np.ndarray,
    lengths: np.ndarray,
) -> int:
    """Places after the longest matches, then after shorter ones until there are `enough`; returns how many.

    Fills a row of `copied` with what follows each place (-1 ends it) and `lengths` with the tokens in common.
    """
    # Of each shard the entries [low, high) have been used; left and right: what the next ones outside have in common.
    low, high = np.zeros(len(orders), np.int64), np.zeros(len(orders), np.int64)
    left, right = np.zeros(len(orders), np.int64), np.zeros(len(orders), np.int64)
    first, sizes = np.zeros(2 * len(orders), np.int64), np.zeros(2 * len(orders), np.int64)
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
                more = _reach(tokens, order, tail, length, low[shard] - 1, -1, low[shard])
                low[shard] -= more
                first[2 * shard], sizes[2 * shard] = low[shard], more
                left[shard] = 0
                if low[shard] > 0:
                    left[shard] = _common(tokens, signed(order, low[shard] - 1), tail, 0, length)
            if right[shard] >= length:
                more = _reach(tokens, order, tail, length, high[shard], 1, order.size - high[shard])
                first[2 * shard + 1], sizes[2 * shard + 1] = high[shard], more
                high[shard] += more
                right[shard] = 0
                if high[shard] < order.size:
                    right[shard] = _common(tokens, signed(order, high[shard]), tail, 0, length)
            total += sizes[2 * shard] + sizes[2 * shard + 1]
            shorter = max(shorter, left[shard], right[shard])
        taken = min(total, lengths.size - count)
        part, passed = 0, 0
        for number in range(taken):
            wanted = number * total // taken  # evenly over all that were found
            while wanted >= passed + sizes[part]:
                passed += sizes[part]
                part += 1
            place = signed(orders[part // 2], first[part] + wanted - passed)
            _copy(shards[part // 2], place, vocabulary, copied[count + number])
            lengths[count + number] = length
        count += taken
        if shorter >= length:
            break  # only in a damaged file
        length = shorter
    return count
