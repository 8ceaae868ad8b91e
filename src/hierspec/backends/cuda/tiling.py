"""Tiles and splits of products: chosen by the shape of the weights alone, never by the number of tokens.

That is what makes bits independent of the width of a pass: a token's sums run over the inputs in one order, in as
many parts as the shape says. More tokens are more columns of the same tiles, or more tiles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How one product is cut. `outputs`: rows of weights that a program multiplies with (of each half, where it has
    two: gate and up, or the two halves of a head)."""

    outputs: int = 64
    inputs: int = 128
    splits: int = 1  # of the inputs; partial sums are added in order by whoever comes last
    stages: int = 4
    warps: int = 4
    norm_inside: bool = False  # norm the inputs while they are read, instead of in a kernel before; needs one split


QKV, OUTPUT, GATED, DOWN, HEAD, JOIN = "qkv", "output", "gated", "down", "head", "join"

# Measured, by what the product is, outputs, inputs and bits of a weight. `gpu_tune.py` prints lines for this table.
# Seen on one H200 for the 8B shape, in microseconds for 1 and 64 tokens: qkv 14.1 / 16.5, output 10.1 / 11.3, gated
# 55.5 / 60.2, down 28.8 / 31.5, head 231 / 259.
MEASURED: dict[tuple[str, int, int, int], Tiles] = {
    (QKV, 6144, 4096, 16): Tiles(32, 128, 2, 4),
    (OUTPUT, 4096, 4096, 16): Tiles(64, 128, 2, 4),
    (GATED, 28672, 4096, 16): Tiles(64, 128, 1, 3),
    (DOWN, 4096, 14336, 16): Tiles(64, 128, 2, 6),
    (HEAD, 128256, 4096, 16): Tiles(64, 128, 1, 3),
}
_MULTIPROCESSORS = 132  # of the GPU that the rule below suits
_FEWEST = 16  # rows of the smallest tile that matrix units take


def tiles_for(what: str, outputs: int, inputs: int, bits: int, widest: int = 64) -> Tiles:
    """The tiles of a product. `widest`: most outputs of a tile, where something else limits them."""
    if known := MEASURED.get((what, outputs, inputs, bits)):
        return known
    return guessed(what, outputs, inputs, widest)


def guessed(what: str, outputs: int, inputs: int, widest: int = 64) -> Tiles:
    """Tiles for a shape that was not measured: enough programs for every multiprocessor, then tiles as large as may
    be."""
    deep = 128 if inputs % 128 == 0 and inputs >= 512 else 64
    halves = 2 if what in (QKV, GATED) else 1
    rows = min(widest, 64)
    while rows > _FEWEST and outputs // (rows * halves) < _MULTIPROCESSORS:
        rows //= 2
    programs = max(outputs // (rows * halves), 1)
    small = inputs <= 1024  # then norming again in every program takes less than another kernel
    splits = 1
    while not small and programs * splits * 2 <= _MULTIPROCESSORS and inputs // (deep * splits * 2) >= 4:
        splits *= 2
    inside = small and splits == 1 and what in (QKV, GATED, HEAD)
    return Tiles(rows, deep, splits, 4, 4 if rows * halves >= 64 else 2, inside)


def tokens_together(rows: int) -> int:
    """Tokens of a tile: a pass over more has more tiles."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64
