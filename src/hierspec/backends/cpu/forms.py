"""Formats of quantised weights, and the layout of blocks of 16 outputs in each of them.

A group of inputs of one output shares a scale and perhaps an offset: weight = scale * integer + offset. Integers of up
to 4 bits are stored in 4 bits, others in 8, as [inputs / 4, 16 outputs, 4 inputs]; with 4 bits, the second half of a
group is in the upper 4 bits of each byte. So a group's integers are whole cache lines, and with 8 bits an AMX tile
(`byte_tiles.py`).

If every group has its own float16 scale, a block stores for each group its integers, 16 scales and 16 offsets; or first
the integers of all groups (see `scales_apart`). In GGUF's K formats several groups form a unit, the inputs that share
one `d`; a group's scale and offset are products of a float16 and a small integer, exact in float32. There a block
stores for each unit: 16 times `d`, 16 times the scale of the minimums, the multipliers of all groups and their minimums
(16 bytes each), then all integers. Either way memory is read from front to back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hierspec.backends.cpu.features import is_arm
from hierspec.backends.cpu.llvm import LANES
from hierspec.checkpoints.gguf_blocks import UnpackedBlocks

LINE = 64  # bytes of a cache line
_INPUTS_PER_STEP = 4


@dataclass(frozen=True)
class Form:
    """The format of one kind of blocks."""

    name: str
    bits: int  # per stored integer, 4 or 8
    group: int  # inputs that share a scale
    unit: int  # inputs that share one d
    offsets: bool = False  # groups have an offset
    zero: int = 0  # zero point, subtracted from stored integers
    signed: bool = False  # stored integers may be negative
    largest: int = 15  # largest absolute value of a stored integer

    @property
    def integers(self) -> range:
        """The integers that it can represent."""
        return range(-self.largest if self.signed else -self.zero, min(self.largest, 127) - self.zero + 1)

    @property
    def groups(self) -> int:
        """Groups per unit: a power of two. With one group, its scale is d itself."""
        return self.unit // self.group

    @property
    def multiplied(self) -> bool:
        """Whether a group's scale is d times a small integer."""
        return self.unit > self.group

    @property
    def integer_bytes(self) -> int:
        """Bytes of a group's integers, for 16 outputs like all sizes here."""
        return self.group * LANES * self.bits // 8

    @property
    def half_bytes(self) -> int:
        """Bytes of a unit's float16 numbers; the multipliers follow them."""
        return 2 * LANES * (2 if self.offsets else 1)

    @property
    def integers_start(self) -> int:
        """Where integers begin in a unit with multipliers."""
        small = self.groups * LANES * (2 if self.offsets else 1)
        return _lines(self.half_bytes + small) * LINE

    @property
    def unit_bytes(self) -> int:
        integers = self.groups * self.integer_bytes
        return (self.integers_start if self.multiplied else self.half_bytes) + integers

    def block_bytes(self, inputs: int) -> int:
        """Bytes of a block, in whole cache lines."""
        return _lines(inputs // self.unit * self.unit_bytes) * LINE


def scales_apart() -> bool:
    """Whether a block stores all its integers before the first scale.

    Then no vector of integers crosses a cache line, which is slow on x86. A Neoverse-N1 reads one stream a third faster
    than two.
    """
    return not is_arm()


def _lines(size: int) -> int:
    return -(-size // LINE)


# With groups of 32, the work per group is a third of the total. 8 bits are accurate enough for groups of 64, 4 are not.
INT8 = Form("int8", 8, 64, 64, signed=True, largest=128)
INT4 = Form("int4", 4, 32, 32, offsets=True)  # GGUF's Q4_1
FILE_FORMS = (
    Form("q4_0", 4, 32, 32, zero=8),
    Form("q8_0", 8, 32, 32, signed=True, largest=128),
    Form("q5_1", 8, 32, 32, offsets=True, largest=31),
    Form("q2_k", 4, 16, 256, offsets=True),
    Form("q3_k", 4, 16, 256, zero=4),
    Form("q4_k", 4, 32, 256, offsets=True),
    Form("q5_k", 8, 32, 256, offsets=True, largest=31),
    Form("q6_k", 8, 16, 256, signed=True, largest=32),
)
FORMS = (INT8, INT4, *FILE_FORMS)
SMALLEST_GROUP = min(form.group for form in FORMS)
_NAMED = {form.name: form for form in FORMS}
# The form that stores the numbers of each GGUF type.
FORM_OF = {
    **{form.name.upper(): form for form in FILE_FORMS},
    "Q4_1": INT4,
    "Q5_0": _NAMED["q8_0"],
    "IQ4_NL": _NAMED["q8_0"],
}


def arrange(blocks: UnpackedBlocks, outputs: int, form: Form) -> np.ndarray:
    """Arranges blocks of [outputs, inputs], in row order, as [outputs / 16, bytes of a block]."""
    panels = outputs // LANES
    inputs = blocks.integers.size // outputs
    arranged = np.zeros((panels, form.block_bytes(inputs)), np.uint8)
    halves, small, target = _parts(arranged, inputs // form.unit, form)
    for index, numbers in enumerate((blocks.d, blocks.offset)[: halves.shape[2]]):
        assert numbers is not None
        halves[:, :, index] = numbers.reshape(panels, LANES, -1).transpose(0, 2, 1)
    for index, multipliers in enumerate((blocks.multipliers, blocks.minimums)[: small.shape[2]]):
        assert multipliers is not None
        small[:, :, index] = multipliers.reshape(panels, LANES, -1, form.groups).transpose(0, 2, 3, 1)
    integers: np.ndarray = blocks.integers.view(np.uint8)
    if form.bits == 4:
        parts = (integers + np.uint8(form.zero) if form.zero else integers).reshape(-1, 2, form.group // 2)
        integers = parts[:, 0] | parts[:, 1] << 4
    words = integers.reshape(panels, LANES, inputs // form.unit, -1).view(np.uint32)  # of 4 inputs each
    target[...] = words.transpose(0, 2, 3, 1)
    return arranged


def dequantise(arranged: np.ndarray, inputs: int, form: Form) -> np.ndarray:
    """The floats that arranged blocks represent, [outputs, inputs]: the model's effective weights."""
    panels, units = len(arranged), inputs // form.unit
    halves, small, words = _parts(arranged, units, form)

    def by_output(numbers: np.ndarray) -> np.ndarray:
        """Rearranges numbers of 16 outputs to one row for each unit of each output."""
        return np.ascontiguousarray(np.moveaxis(numbers, -1, 1)).reshape(panels * LANES * units, -1)

    d, *offset = [by_output(halves[:, :, index])[:, 0] for index in range(halves.shape[2])]
    multipliers = [by_output(small[:, :, index]) for index in range(small.shape[2])]
    octets = np.ascontiguousarray(words).view(np.uint8)
    octets = octets.reshape(panels, units, form.groups, -1, LANES, _INPUTS_PER_STEP)
    if form.bits == 4:
        octets = np.concatenate((octets & 15, octets >> 4), axis=3)
    integers = octets.view(np.int8).transpose(0, 4, 1, 2, 3, 5).reshape(panels * LANES * units, form.unit)
    numbers = [*multipliers, None, None]
    blocks = UnpackedBlocks(integers - np.int8(form.zero), d, numbers[0], offset[0] if offset else None, numbers[1])
    return blocks.values().reshape(panels * LANES, inputs)


def _parts(arranged: np.ndarray, units: int, form: Form) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of the blocks: float16 [panels, units, 1 or 2, 16], small integers [panels, units, 0 to 2, groups, 16], and
    integers as words [panels, units, words, 16]."""
    panels = len(arranged)
    arranged = arranged[:, : units * form.unit_bytes]
    if form.multiplied:
        arranged = arranged.reshape(panels, units, form.unit_bytes)
        small_bytes = form.groups * LANES * (2 if form.offsets else 1)
        halves = arranged[..., : form.half_bytes]
        small = arranged[..., form.half_bytes : form.half_bytes + small_bytes]
        integers = arranged[..., form.integers_start :]
    elif not scales_apart():
        arranged = arranged.reshape(panels, units, form.unit_bytes)
        integers, halves = arranged[..., : form.integer_bytes], arranged[..., form.integer_bytes :]
        small = np.empty((panels, units, 0), np.uint8)
    else:
        end = units * form.integer_bytes
        integers = arranged[:, :end].reshape(panels, units, form.integer_bytes)
        halves = arranged[:, end:].reshape(panels, units, form.half_bytes)
        small = np.empty((panels, units, 0), np.uint8)
    return (
        halves.view(np.float16).reshape(panels, units, -1, LANES),
        small.view(np.int8).reshape(panels, units, small.shape[2] // (form.groups * LANES), form.groups, LANES),
        integers.view(np.uint32).reshape(panels, units, -1, LANES),
    )
