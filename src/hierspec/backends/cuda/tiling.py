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

# Measured on an H200 in graphs over many layers' weights, by what the product is, outputs, inputs and bits of a weight;
# a norm before it counts. In us for 1 / 16 / 64 tokens, 8B shape: qkv 19.8 / 20.0 / 23.7, output 11.4 / 11.6 /
# 13.5, gated 60.2 / 61.2 / 68.5, down 31.7 / 32.2 / 35.1, head 241 / 248 / 266; default model: qkv 5.9 / 6.2 / 7.3,
# output 3.3 / 3.3 / 5.2, gated 5.6 / 5.7 / 7.2, down 4.3 / 4.4 / 5.9.
MEASURED: dict[tuple[str, int, int, int], Tiles] = {
    (QKV, 6144, 4096, 16): Tiles(64, 64, 2, 5),
    (OUTPUT, 4096, 4096, 16): Tiles(64, 128, 2, 5),
    (GATED, 28672, 4096, 16): Tiles(64, 128, 1, 3),
    (DOWN, 4096, 14336, 16): Tiles(64, 128, 2, 5),
    (HEAD, 128256, 4096, 16): Tiles(64, 128, 1, 3),
    (QKV, 960, 576, 16): Tiles(16, 64, 1, 5, 2),
    (OUTPUT, 576, 576, 16): Tiles(16, 128, 1, 5, 2),
    (GATED, 3072, 576, 16): Tiles(16, 64, 1, 5, 2),
    (DOWN, 576, 1536, 16): Tiles(16, 128, 4, 5, 2),
    (HEAD, 49152, 576, 16): Tiles(128, 64, 1, 3),
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
