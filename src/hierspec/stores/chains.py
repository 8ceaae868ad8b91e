"""Where has this run of tokens stood before? A ring of tokens with hash chains, as in LZ77."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hierspec.stores.compiled import compiled_brief

LONGEST = 64  # a match is followed back over so many tokens at most
SEPARATOR = -1  # between documents; also marks the end of what is known

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_VISITS = 2  # places looked at in one chain, as a multiple of the places wanted
_CHUNK = 1 << 16  # tokens indexed in one call: milliseconds, so that other threads get their turn
_SMALL_BITS = 18  # single tokens need no larger table than a vocabulary
_MASK31 = (1 << 31) - 1
_MASK32 = (1 << 32) - 1
_LEVELS = 2  # where in the state the levels begin: size, cursor, then three numbers a level


@dataclass(slots=True)  # not frozen: that would double the microsecond it takes to make one
class Matches:
    """Places that agree with the end of a text, longest match first, newest first among equals."""

    ends: np.ndarray  # [n] int64, where in the ring the token right after the match stands
    lengths: np.ndarray  # [n] int32, tokens that really agree, at most LONGEST

    def __len__(self) -> int:
        return len(self.ends)


class ChainIndex:
    """A ring of tokens; for every run length a table run-hash -> newest place, and for every place the one before it.

    A place is indexed once a token follows it, so whatever is found has a continuation. Hashes may collide: tokens
    are always compared. All memory is taken at the start.
    """

    def __init__(self, capacity: int, lengths: Sequence[int] = (1, 2, 4, 8)) -> None:
        if capacity < 1 or not lengths or lengths[0] < 1 or lengths[-1] > LONGEST:
            raise ValueError(f"an index needs room for a token, and run lengths from 1 to {LONGEST}")
        if any(shorter >= longer for shorter, longer in pairwise(lengths)):
            raise ValueError("the run lengths of an index must rise")
        if capacity >= _MASK31:
            raise ValueError("an index holds at most 2^31 - 2 tokens")
        self.capacity = capacity
        self.lengths = tuple(lengths)
        # One slot more than tokens: the one after the newest token holds a separator, which ends every walk.
        self.tokens = np.full(capacity + 1, SEPARATOR, np.int32)
        bits = max(6, capacity.bit_length() - 1)
        state, offset = [0, 0], 0
        for length in lengths:
            level_bits = min(bits, _SMALL_BITS) if length == 1 else bits
            state += [length, level_bits, offset]
            offset += 1 << level_bits
        heads = np.zeros(offset, np.uint32)  # newest place of a hash, by the low 32 bits of its position
        before = np.zeros((len(lengths), capacity + 1), np.uint32)  # the place before it, of the same hash
        self.arrays = (np.array(state, np.int64), self.tokens, before, heads)  # what compiled functions are given

    @property
    def size(self) -> int:
        """Tokens ever appended, separators included."""
        return int(self.arrays[0][0])

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def append(self, tokens: np.ndarray | Sequence[int]) -> None:
        """The text goes on with these; a negative one separates documents, and no match or continuation crosses it."""
        if len(tokens) <= _CHUNK:
            append_tokens(*self.arrays, np.array(tokens, _INT32))
            return
        for start in range(0, len(tokens), _CHUNK):
            self.append(tokens[start : start + _CHUNK])

    def find(self, context: np.ndarray, most: int = 32) -> Matches:
        """Up to `most` places that agree with the end of `context`.

        For every run length, the longest first, the newest 2 * `most` places of its chain are looked at and the
        longest matches among them kept; shorter runs are only asked while places are missing. So a match that is
        found is really that long, and one that is missed is older than so many others that end in the same run.
        """
        tail = context[-LONGEST:].astype(_INT32)  # a copy always has the one type that is compiled for
        ends, lengths = np.empty(most, _INT64), np.empty(most, _INT32)
        count = find_places(*self.arrays, tail, ends, lengths)
        return Matches(ends[:count], lengths[:count])


@compiled_brief
def _mixed(hashed: int, token: int) -> int:
    """One more token of a run, nearest the end first. 31 bits, so that no product overflows 64."""
    hashed = ((hashed ^ (token + 1)) * 0x5BD1E995) & _MASK31
    return hashed ^ (hashed >> 15)


@compiled_brief
def _bucket(hashed: int, bits: int, offset: int) -> int:
    return offset + (((hashed * 0x6C8E9CF5) & _MASK31) >> (31 - bits))


@compiled_brief
def append_tokens(
    state: np.ndarray, ring: np.ndarray, before: np.ndarray, heads: np.ndarray, tokens: np.ndarray
) -> None:
    """`ChainIndex.append` for compiled callers."""
    slots, levels = ring.shape[0], before.shape[0]
    size, cursor = int(state[0]), int(state[1])
    for i in range(tokens.shape[0]):
        token = int(tokens[i])
        if token >= 0:  # the runs that end here now have a continuation: index them
            hashed, length, place = 0, 0, cursor
            for level in range(levels):
                wanted = int(state[_LEVELS + 3 * level])
                while length < wanted:
                    place = place - 1 if place > 0 else slots - 1
                    earlier = int(ring[place])
                    if earlier < 0:
                        break
                    hashed = _mixed(hashed, earlier)
                    length += 1
                if length < wanted:
                    break
                bucket = _bucket(hashed, int(state[_LEVELS + 3 * level + 1]), int(state[_LEVELS + 3 * level + 2]))
                before[level, cursor] = heads[bucket]
                heads[bucket] = size & _MASK32
        ring[cursor] = max(token, SEPARATOR)
        size += 1
        cursor = cursor + 1 if cursor + 1 < slots else 0
        ring[cursor] = SEPARATOR
    state[0], state[1] = size, cursor


@compiled_brief
def find_places(
    state: np.ndarray,
    ring: np.ndarray,
    before: np.ndarray,
    heads: np.ndarray,
    context: np.ndarray,
    ends: np.ndarray,
    lengths: np.ndarray,
) -> int:
    """`ChainIndex.find` for compiled callers: fills `ends` and `lengths` and returns how many there are."""
    slots, levels, known, most = ring.shape[0], before.shape[0], context.shape[0], ends.shape[0]
    size, cursor = int(state[0]), int(state[1])
    count, longer = 0, LONGEST + 1
    for level in range(levels - 1, -1, -1):
        wanted = int(state[_LEVELS + 3 * level])
        if wanted > known:
            continue
        hashed, reach = 0, min(known, longer)  # matches of `longer` and more were found through longer runs
        for i in range(wanted):
            hashed = _mixed(hashed, int(context[known - 1 - i]))
        first, youngest = count, 0  # results of longer runs stay before `first`
        place = int(heads[_bucket(hashed, int(state[_LEVELS + 3 * level + 1]), int(state[_LEVELS + 3 * level + 2]))])
        for _ in range(_VISITS * most):
            age = (size - place) & _MASK32
            if place == 0 or age <= youngest or age >= slots:
                break  # the chain ends, or leads to what the ring has overwritten
            youngest = age
            slot = cursor - age if age <= cursor else cursor - age + slots
            length, at = 0, slot
            while length < reach:
                at = at - 1 if at > 0 else slots - 1
                token = int(ring[at])
                if token < 0 or token != int(context[known - 1 - length]):
                    break
                length += 1
            if wanted <= length < longer and ring[slot] >= 0:
                spot = count
                if count < most:
                    count += 1
                elif lengths[most - 1] < length:
                    spot = most - 1
                if spot < most:
                    while spot > first and lengths[spot - 1] < length:
                        lengths[spot], ends[spot] = lengths[spot - 1], ends[spot - 1]
                        spot -= 1
                    lengths[spot], ends[spot] = length, slot
                    if count == most and lengths[most - 1] >= min(known, longer - 1):
                        break  # no older place can be better
            place = int(before[level, slot])
        if count == most:
            break
        longer = wanted
    return count
