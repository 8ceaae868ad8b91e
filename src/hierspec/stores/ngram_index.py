"""Finds earlier occurrences of a text's last tokens: a ring of tokens with hash chains over n-grams, as in LZ77."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hierspec.compiled import compiled_brief, compiled_part

LONGEST = 64  # tokens of a match that are compared, at most
SEPARATOR = -1  # between documents, and after the newest token

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_VISITS = 2  # positions visited in one hash chain, as a multiple of the matches wanted
_CHUNK = 1 << 16  # tokens indexed in one call: milliseconds, so that other threads can run in between
_UNIGRAM_BITS = 18  # single tokens need no table larger than a vocabulary
_MASK31 = (1 << 31) - 1
_MASK32 = (1 << 32) - 1
_LEVELS = 2  # offset of the levels in the state: size, cursor, then (n-gram length, table bits, table offset) each


@dataclass(slots=True)  # not frozen: that would double the microsecond it takes to make one
class Matches:
    """Positions whose preceding tokens equal the end of a text; longest first, then newest first."""

    ends: np.ndarray  # [n] int64, ring slot of the token right after the match
    lengths: np.ndarray  # [n] int32, matching tokens, at most LONGEST

    def __len__(self) -> int:
        return len(self.ends)


class NgramIndex:
    """A ring of tokens. For every n-gram length: a table from hash to newest position, and links to older positions.

    A position is indexed once a token follows it, so every match has a continuation. Hashes may collide, so tokens
    are always compared. All memory is allocated at the start.
    """

    def __init__(self, capacity: int, lengths: Sequence[int] = (1, 2, 4, 8)) -> None:
        if capacity < 1 or not lengths or lengths[0] < 1 or lengths[-1] > LONGEST:
            raise ValueError(f"an index needs room for a token, and n-gram lengths from 1 to {LONGEST}")
        if any(shorter >= longer for shorter, longer in pairwise(lengths)):
            raise ValueError("the n-gram lengths of an index must increase")
        if capacity >= _MASK31:
            raise ValueError("an index holds at most 2^31 - 2 tokens")
        self.capacity = capacity
        self.lengths = tuple(lengths)
        # One slot more than tokens: the slot after the newest token holds a separator, which ends every comparison.
        self.tokens = np.full(capacity + 1, SEPARATOR, np.int32)
        bits = max(6, capacity.bit_length() - 1)
        state, offset = [0, 0], 0
        for length in lengths:
            level_bits = min(bits, _UNIGRAM_BITS) if length == 1 else bits
            state += [length, level_bits, offset]
            offset += 1 << level_bits
        heads = np.zeros(offset, np.uint32)  # bucket -> newest position, its low 32 bits
        older = np.zeros((len(lengths), capacity + 1), np.uint32)  # level, slot -> next older position of the bucket
        self.arrays = (np.array(state, np.int64), self.tokens, older, heads)  # arguments of the compiled functions

    @property
    def size(self) -> int:
        """Tokens ever appended, separators included."""
        return int(self.arrays[0][0])

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def append(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Appends to the text. A negative token separates documents: no match or continuation crosses it."""
        if len(tokens) <= _CHUNK:
            append_tokens(*self.arrays, np.array(tokens, _INT32))
            return
        for start in range(0, len(tokens), _CHUNK):
            self.append(tokens[start : start + _CHUNK])

    def find(self, context: np.ndarray, max_matches: int = 32) -> Matches:
        """Up to `max_matches` matches of the end of `context`.

        N-gram lengths are tried longest first, shorter ones only while matches are missing. Of each hash chain the
        newest 2 * `max_matches` positions are visited and the longest matches returned. Lengths are exact; a match is
        missed only if so many newer positions have the same n-gram.
        """
        tail = context[-LONGEST:].astype(_INT32)  # astype copies, so the compiled code sees one array type only
        ends, lengths = np.empty(max_matches, _INT64), np.empty(max_matches, _INT32)
        count = find_matches(*self.arrays, tail, ends, lengths)
        return Matches(ends[:count], lengths[:count])


@compiled_part
def _extend_hash(ngram_hash: int, token: int) -> int:
    """Hashes one token more, from the end of the n-gram backwards. 31 bits, so that no product overflows 64."""
    ngram_hash = ((ngram_hash ^ (token + 1)) * 0x5BD1E995) & _MASK31
    return ngram_hash ^ (ngram_hash >> 15)


@compiled_part
def _bucket(ngram_hash: int, bits: int, offset: int) -> int:
    return offset + (((ngram_hash * 0x6C8E9CF5) & _MASK31) >> (31 - bits))


@compiled_brief
def append_tokens(
    state: np.ndarray, ring: np.ndarray, older: np.ndarray, heads: np.ndarray, tokens: np.ndarray
) -> None:
    """`NgramIndex.append` for compiled callers."""
    slots, levels = ring.shape[0], older.shape[0]
    size, cursor = int(state[0]), int(state[1])
    for i in range(tokens.shape[0]):
        token = int(tokens[i])
        if token >= 0:  # the n-grams that end here now have a continuation: index them
            ngram_hash, length, slot = 0, 0, cursor
            for level in range(levels):
                level_length = int(state[_LEVELS + 3 * level])
                while length < level_length:
                    slot = slot - 1 if slot > 0 else slots - 1
                    earlier = int(ring[slot])
                    if earlier < 0:
                        break
                    ngram_hash = _extend_hash(ngram_hash, earlier)
                    length += 1
                if length < level_length:
                    break
                bucket = _bucket(ngram_hash, int(state[_LEVELS + 3 * level + 1]), int(state[_LEVELS + 3 * level + 2]))
                older[level, cursor] = heads[bucket]
                heads[bucket] = size & _MASK32
        ring[cursor] = max(token, SEPARATOR)
        size += 1
        cursor = cursor + 1 if cursor + 1 < slots else 0
        ring[cursor] = SEPARATOR
    state[0], state[1] = size, cursor


@compiled_brief
def find_matches(
    state: np.ndarray,
    ring: np.ndarray,
    older: np.ndarray,
    heads: np.ndarray,
    context: np.ndarray,
    ends: np.ndarray,
    lengths: np.ndarray,
) -> int:
    """`NgramIndex.find` for compiled callers: fills `ends` and `lengths` and returns the number of matches."""
    slots, levels, context_length, max_matches = ring.shape[0], older.shape[0], context.shape[0], ends.shape[0]
    size, cursor = int(state[0]), int(state[1])
    count, longer = 0, LONGEST + 1
    for level in range(levels - 1, -1, -1):
        level_length = int(state[_LEVELS + 3 * level])
        if level_length > context_length:
            continue
        # Matches of `longer` tokens and more were found through longer n-grams.
        ngram_hash, max_length = 0, min(context_length, longer)
        for i in range(level_length):
            ngram_hash = _extend_hash(ngram_hash, int(context[context_length - 1 - i]))
        first, last_age = count, 0  # results of longer n-grams stay before `first`
        bucket = _bucket(ngram_hash, int(state[_LEVELS + 3 * level + 1]), int(state[_LEVELS + 3 * level + 2]))
        position = int(heads[bucket])
        for _ in range(_VISITS * max_matches):
            age = (size - position) & _MASK32
            if position == 0 or age <= last_age or age >= slots:
                break  # the chain ends, or leads to what the ring has overwritten
            last_age = age
            slot = cursor - age if age <= cursor else cursor - age + slots
            length, compared = 0, slot
            while length < max_length:
                compared = compared - 1 if compared > 0 else slots - 1
                token = int(ring[compared])
                if token < 0 or token != int(context[context_length - 1 - length]):
                    break
                length += 1
            if level_length <= length < longer and ring[slot] >= 0:
                rank = count
                if count < max_matches:
                    count += 1
                elif lengths[max_matches - 1] < length:
                    rank = max_matches - 1
                if rank < max_matches:
                    while rank > first and lengths[rank - 1] < length:
                        lengths[rank], ends[rank] = lengths[rank - 1], ends[rank - 1]
                        rank -= 1
                    lengths[rank], ends[rank] = length, slot
                    if count == max_matches and lengths[max_matches - 1] >= min(context_length, longer - 1):
                        break  # no older match can be longer
            position = int(older[level, slot])
        if count == max_matches:
            break
        longer = level_length
    return count
