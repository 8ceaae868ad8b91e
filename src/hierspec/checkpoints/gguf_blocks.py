"""The content of GGUF's quantised blocks: small integers, scales and offsets.

A block's groups of inputs each have a scale, d or d times a small integer, and perhaps an offset: a weight is
scale * integer + offset. Unpacking a block rounds nothing; `values` rounds as the gguf package does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_K = 256  # numbers per block of a K-quantisation
_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)  # shifts of the four numbers in a byte
_HALVES = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
_EIGHTHS = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)


@dataclass(frozen=True, eq=False)
class UnpackedBlocks:
    """Unpacked blocks. The groups of a block have equal lengths."""

    integers: np.ndarray  # [blocks, numbers] int8
    d: np.ndarray  # [blocks] float16: scale of the block
    multipliers: np.ndarray | None = None  # [blocks, groups] int8: a group's scale is d * multiplier; None: d
    offset: np.ndarray | None = None  # [blocks] float16: the offset, or the scale of the minimums
    minimums: np.ndarray | None = None  # [blocks, groups] int8: a group's offset is -offset * minimum

    def scales(self) -> np.ndarray:
        """[blocks, groups], exact."""
        d = self.d.astype(np.float32)[:, None]
        return d if self.multipliers is None else d * self.multipliers.astype(np.float32)

    def offsets(self) -> np.ndarray | None:
        """[blocks, groups], exact."""
        if self.offset is None:
            return None
        offset = self.offset.astype(np.float32)[:, None]
        return offset if self.minimums is None else -(offset * self.minimums.astype(np.float32))

    def values(self) -> np.ndarray:
        """[blocks, numbers] float32: the weights."""
        scales, offsets = self.scales(), self.offsets()
        grouped = self.integers.reshape(*scales.shape, -1).astype(np.float32) * scales[:, :, None]
        if offsets is not None:
            grouped += offsets[:, :, None]
        return grouped.reshape(self.integers.shape)


def unpack(blocks: np.ndarray, quantisation: str) -> UnpackedBlocks:
    """Unpacks blocks [blocks, bytes of a block] of the quantisation with this name."""
    return _UNPACK[quantisation](blocks)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)[:, 0]


def _nibbles(octets: np.ndarray, at_once: int) -> np.ndarray:
    """Low halves of each `at_once` bytes, then their high halves."""
    count = len(octets)
    return ((octets.reshape(count, -1, 1, at_once) >> _HALVES) & 15).reshape(count, -1)


def _bits(octets: np.ndarray) -> np.ndarray:
    """The 32 bits of 4 bytes, lowest first."""
    return np.unpackbits(octets, axis=1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(blocks[:, 2:], 16).view(np.int8) - np.int8(8), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(blocks[:, 4:], 16).view(np.int8), _half(blocks, 0), offset=_half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> UnpackedBlocks:
    integers = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return UnpackedBlocks(integers.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> UnpackedBlocks:
    integers = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return UnpackedBlocks(integers.view(np.int8), _half(blocks, 0), offset=_half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0))


def _iq4_nl(blocks: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(_IQ4_NL[_nibbles(blocks[:, 2:], 16)], _half(blocks, 0))


def _q2_k(blocks: np.ndarray) -> UnpackedBlocks:
    scales, octets = blocks[:, : _K // 16], blocks[:, _K // 16 : _K // 16 + _K // 4]
    integers = ((octets.reshape(len(blocks), -1, 1, 32) >> _PAIRS) & 3).reshape(len(blocks), _K)
    return UnpackedBlocks(
        integers.view(np.int8),
        _half(blocks, 80),
        (scales & 15).view(np.int8),
        _half(blocks, 82),
        (scales >> 4).view(np.int8),
    )


def _q3_k(blocks: np.ndarray) -> UnpackedBlocks:
    count = len(blocks)
    high, octets = blocks[:, : _K // 8], blocks[:, _K // 8 : _K // 8 + _K // 4]
    # Of a multiplier's six bits the low four are in the first 8 bytes, the high two in the last 4.
    low_scales, high_scales = blocks[:, 96:104], blocks[:, 104:108]
    multipliers = (
        _nibbles(low_scales, 8) | ((high_scales.reshape(count, 1, 1, 4) >> _PAIRS) & 3).reshape(count, -1) << 4
    )
    low = ((octets.reshape(count, -1, 1, 32) >> _PAIRS) & 3).reshape(count, _K)
    # A bit that is not set subtracts 4.
    unset = (((high.reshape(count, -1, 1, 32) >> _EIGHTHS) & 1) ^ 1).reshape(count, _K)
    integers = low.view(np.int8) - (unset << 2).view(np.int8)
    return UnpackedBlocks(integers, _half(blocks, 108), multipliers.view(np.int8) - np.int8(32))


def _six_bits(octets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 multipliers and 8 minimums in the 12 bytes of a block of Q4_K or Q5_K."""
    first, second, rest = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    multipliers = np.concatenate([first & 63, (rest & 15) | (first >> 2 & 48)], axis=1)
    minimums = np.concatenate([second & 63, (rest >> 4) | (second >> 2 & 48)], axis=1)
    return multipliers.view(np.int8), minimums.view(np.int8)


def _q4_k(blocks: np.ndarray) -> UnpackedBlocks:
    multipliers, minimums = _six_bits(blocks[:, 4:16])
    integers = _nibbles(blocks[:, 16:], 32).view(np.int8)
    return UnpackedBlocks(integers, _half(blocks, 0), multipliers, _half(blocks, 2), minimums)


def _q5_k(blocks: np.ndarray) -> UnpackedBlocks:
    multipliers, minimums = _six_bits(blocks[:, 4:16])
    high = ((blocks[:, 16:48].reshape(len(blocks), 1, 1, 32) >> _EIGHTHS) & 1).reshape(len(blocks), _K)
    integers = (_nibbles(blocks[:, 48:], 32) | high << 4).view(np.int8)
    return UnpackedBlocks(integers, _half(blocks, 0), multipliers, _half(blocks, 2), minimums)


def _q6_k(blocks: np.ndarray) -> UnpackedBlocks:
    count = len(blocks)
    high = ((blocks[:, 128:192].reshape(count, -1, 1, 32) >> _PAIRS) & 3).reshape(count, _K)
    integers = (_nibbles(blocks[:, :128], 64) | high << 4).view(np.int8) - np.int8(32)
    return UnpackedBlocks(integers, _half(blocks, 208), np.ascontiguousarray(blocks[:, 192:208]).view(np.int8))


_UNPACK: dict[str, Callable[[np.ndarray], UnpackedBlocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
