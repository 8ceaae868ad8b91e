"""Tiles and splits of products: chosen by the shape of the weights alone, never by the number of tokens.

So bits do not depend on the width of a pass: a token's sums run over the inputs in one order, in as many parts as the
shape determines. More tokens mean more columns of the same tiles, or more tiles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How one product is cut.

    `outputs`: rows of weights per program (of each half, if there are two: gate and up, or the halves of a head).
    """

    outputs: int = 64
    inputs: int = 128
    splits: int = 1  # of the inputs; the last program to arrive adds the partial sums in order
    stages: int = 4
    warps: int = 4


QKV, OUTPUT, GATED, DOWN, HEAD, JOIN = "qkv", "output", "gated", "down", "head", "join"

# Measured on an H200 in graphs over many layers' weights, by product, outputs, inputs and bits per weight, including
# both halves of the norms around the product. In us for 1 / 16 / 64 tokens, 8B shape: qkv 17.6 / 18.5 / 22.2, output
# 12.0 / 12.3 / 14.4, gated 58.7 / 60.0 / 65.8 (with 128 inputs in 3 stages 58.0 / 58.9 / 72.1), down 31.8 / 32.4 /
# 35.5; default model: qkv 3.5 / 3.8 / 6.4, output 2.6 / 2.7 / 3.5, gated 3.7 / 3.9 / 6.8, down 3.5 / 3.8 / 6.6.
MEASURED: dict[tuple[str, int, int, int], Tiles] = {
    (QKV, 6144, 4096, 16): Tiles(64, 128, 2, 4),
    (OUTPUT, 4096, 4096, 16): Tiles(64, 128, 2, 5),
    (GATED, 28672, 4096, 16): Tiles(64, 64, 1, 4),
    (DOWN, 4096, 14336, 16): Tiles(64, 128, 2, 5),
    (HEAD, 128256, 4096, 16): Tiles(64, 128, 1, 3),
    (QKV, 960, 576, 16): Tiles(16, 64, 1, 5, 2),
    (OUTPUT, 576, 576, 16): Tiles(16, 64, 1, 5, 4),
    (GATED, 3072, 576, 16): Tiles(16, 64, 1, 9, 2),
    (DOWN, 576, 1536, 16): Tiles(16, 128, 6, 3, 2),
    (HEAD, 49152, 576, 16): Tiles(128, 64, 1, 3),
}
_MULTIPROCESSORS = 132  # of the GPU that the rule below is tuned for
_FEWEST = 16  # rows of the smallest tile for tensor cores
_SMALL = 1024  # inputs that are not worth splitting


def tiles_for(what: str, outputs: int, inputs: int, bits: int, widest: int = 64) -> Tiles:
    """The tiles of a product. `widest`: upper limit of outputs per tile."""
    if known := MEASURED.get((what, outputs, inputs, bits)):
        return known
    if bits == 8 and min(outputs, inputs) > _SMALL:
        return _of_bytes(what, outputs, inputs, widest)
    return guessed(what, outputs, inputs, widest)


def _of_bytes(what: str, outputs: int, inputs: int, widest: int) -> Tiles:
    """Tiles for large matrices of 8-bit weights.

    A tile has half the bytes of one of bfloat16, so more programs must read at once. Two warps: with four and 64 rows
    the compiler takes instructions of warp groups, and copies 8-bit weights for them in pieces of 8 bytes.
    """
    rows, halves = min(widest, 32), 2 if what in (QKV, GATED) else 1
    programs, splits = max(outputs // (rows * halves), 1), 1
    while what != HEAD and programs * splits * 2 <= 4 * _MULTIPROCESSORS and inputs // (128 * splits * 2) >= 4:
        splits *= 2
    return Tiles(rows, 128, splits, 4, 2)


def guessed(what: str, outputs: int, inputs: int, widest: int = 64) -> Tiles:
    """Tiles for a shape that was not measured: enough programs for all multiprocessors, then tiles as large as
    possible."""
    deep = 128 if inputs % 128 == 0 and inputs >= 512 else 64
    halves = 2 if what in (QKV, GATED) else 1
    rows = min(widest, 64)
    while rows > _FEWEST and outputs // (rows * halves) < _MULTIPROCESSORS:
        rows //= 2
    programs = max(outputs // (rows * halves), 1)
    splits = 1
    while inputs > _SMALL and programs * splits * 2 <= _MULTIPROCESSORS and inputs // (deep * splits * 2) >= 4:
        splits *= 2
    return Tiles(rows, deep, splits, 4, 4 if rows * halves >= 64 else 2)


def tokens_together(rows: int) -> int:
    """Tokens per tile; a pass over more tokens has more tiles."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64
