"""The numbers of a fused round for the kernels: those of the drafter's passes and of the one that verifies.

They depend on the text's last position alone, not on its tokens. So the host prepares them for all positions at which
the next round may begin, and the device takes those of the one where it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from hierspec.backends.base import RoundRows
from hierspec.backends.cuda.attention import FIELDS, KEYS
from hierspec.backends.cuda.pick_kernels import PARAMETERS
from hierspec.backends.cuda.pieces import CHAIN, ROW_ARRAYS, numbers_of_round
from hierspec.backends.cuda.work import MOST_PIECES, Work, pieces_for, rows_of_a_tile, width_for
from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.draft_tree import DraftTree

_WORDS = 2  # 32-bit words per 64-bit number
_NONE = np.zeros(0, np.int32)
_Row = tuple[int, int, int, list[int]]  # position, slot, length and path


@dataclass(frozen=True, eq=False)
class Relative:
    """The rows of some passes over one text, relative to its last entry. Slots are codes as in `pieces.py`."""

    starts: np.ndarray  # [passes + 1]: rows of each pass
    offsets: np.ndarray  # [rows]: positions
    codes: np.ndarray  # [rows]: slots
    lengths: np.ndarray
    path_starts: np.ndarray
    paths: np.ndarray  # codes of slots
    drafted: np.ndarray

    rows: tuple[int, ...]  # of each pass


@dataclass(frozen=True, eq=False)
class RoundShape:
    """A tree as passes. The drafter's first pass reads the last tokens again; each further one continues the nodes of
    one depth that have children."""

    tree: DraftTree
    drafting: Relative
    verifying: Relative
    features: np.ndarray  # of the later drafting passes: codes of the slots of their rows' features
    sources: tuple[np.ndarray, ...]  # of each later drafting pass: its nodes
    places: np.ndarray  # [nodes, 2]: row of all the drafter's, and pick there, that is the node's token

    @property
    def drafting_rows(self) -> int:
        """Rows with picks: one of the first pass, and all later ones."""
        return 1 + sum(len(nodes) for nodes in self.sources)


@cache
def shape_of(tree: DraftTree, reread: int) -> RoundShape:
    continued = [nodes for depth in range(tree.depth) if (nodes := tree.continued(depth))]
    code, spare = {}, CHAIN
    for depth, nodes in enumerate(continued):
        for node in nodes:
            code[node] = 1 + depth if node == depth else spare
            spare += node != depth
    row_of = {-1: 0}
    for node in (node for nodes in continued for node in nodes):
        row_of[node] = len(row_of)
    paths = {-1: list[int]()}
    for nodes in continued:
        for node in nodes:
            paths[node] = [*paths[tree.parents[node]], code[node]]
    first = list(range(1 - reread, 1))
    drafting = _relative(
        [
            [(offset, offset, offset + 1, []) for offset in first],
            *([(1 + depth, code[node], 1, paths[node]) for node in nodes] for depth, nodes in enumerate(continued)),
        ],
        _NONE,
    )
    up: dict[int, list[int]] = {-1: []}
    for node, parent in enumerate(tree.parents):
        up[node] = [*up[parent], 1 + node]
    # A node that stands where it will stand in the text needs no path: all before it are its ancestors.
    rows: list[_Row] = [(0, 0, 1, [])]
    for node, depth in enumerate(tree.depths):
        length, path = (2 + node, list[int]()) if node == depth else (1, up[node])
        rows.append((1 + depth, 1 + node, length, path))
    verifying = _relative([rows], np.array([0, *(1 for _ in tree.depths)]))
    return RoundShape(
        tree,
        drafting,
        verifying,
        np.array([code.get(tree.parents[node], 0) for nodes in continued for node in nodes], np.int64),
        tuple(np.array(nodes) for nodes in continued),
        np.array([(row_of[parent], rank) for parent, rank in zip(tree.parents, tree.ranks, strict=True)]),
    )


def _relative(passes: Sequence[Sequence[_Row]], drafted: np.ndarray) -> Relative:
    """From position, slot, length and path of each row."""
    rows = [row for each in passes for row in each]
    return Relative(
        np.cumsum([0, *map(len, passes)]),
        np.array([offset for offset, *_ in rows]),
        np.array([code for _, code, *_ in rows]),
        np.array([length for *_, length, _ in rows]),
        np.cumsum([0, *(len(path) for *_, path in rows)]),
        np.array([code for *_, path in rows for code in path], np.int64),
        drafted.astype(np.int64) if len(drafted) else np.zeros(len(rows), np.int64),
        tuple(map(len, passes)),
    )


@dataclass(frozen=True)
class Passes:
    """What kernels must know of passes, in the order in which they run."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    pieces: tuple[int, ...]
    tiles: tuple[int, ...]
    sizes: tuple[int, ...]  # numbers of each

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Widths, pieces and tiles."""
        return np.array(self.widths), np.array(self.pieces), np.array(self.tiles)

    def work(self, number: int) -> Work:
        return Work(self.rows[number], self.widths[number], self.pieces[number], True, self.tiles[number], _NONE)


def passes_at(relative: Relative, config: DecoderConfig, position: int) -> Passes | None:
    """For rounds whose rows are all in the block of keys of this position, or before; None: they do not fit."""
    group, blocks = config.heads // config.kv_heads, position // KEYS + 1
    rows = relative.rows
    tiles = [rows_of_a_tile(count * group, position) for count in rows]
    lengths = np.diff(relative.path_starts)
    pieces, sizes = [], []
    for number, (count, tile) in enumerate(zip(rows, tiles, strict=True)):
        here = lengths[relative.starts[number] : relative.starts[number + 1]]
        # Rows with a path may see two blocks of it.
        needed = -(-count // (tile // group)) * blocks + 2 * int((here > 0).sum())
        if needed > MOST_PIECES:
            return None
        pieces.append(pieces_for(count, needed))
        sizes.append(ROW_ARRAYS * width_for(count) + pieces[-1] * FIELDS + int(here.sum()))
    return Passes(tuple(rows), tuple(map(width_for, rows)), tuple(pieces), tuple(tiles), tuple(sizes))


@dataclass(frozen=True)
class RoundLayout:
    """Where everything is in the numbers of a round.

    Order: parameters of the drafter's picks and of those that verify, slots of features of the first pass and of the
    later ones, the drafter's passes, the pass that verifies.
    """

    drafting: Passes
    verifying: Passes
    keys: int  # rows with parameters of the drafter's picks
    features: int  # of the later passes

    @property
    def verified_keys(self) -> int:
        """Where the parameters of the picks that verify begin."""
        return self.keys * PARAMETERS * _WORDS

    @property
    def first_features(self) -> int:
        return self.verified_keys + self.verifying.widths[0] * PARAMETERS * _WORDS

    @property
    def later_features(self) -> int:
        return self.first_features + self.drafting.widths[0]

    @property
    def works(self) -> int:
        return self.later_features + self.features

    @property
    def verified_work(self) -> int:
        return self.works + sum(self.drafting.sizes)

    @property
    def size(self) -> int:
        return self.verified_work + sum(self.verifying.sizes)


def layout_at(
    shape: RoundShape, drafter: DecoderConfig, target: DecoderConfig, position: int, skipped: int
) -> RoundLayout | None:
    """The layout for rounds that end in this position's block of keys; None: they do not fit."""
    drafting = passes_at(shape.drafting, drafter, position - skipped)
    verifying = passes_at(shape.verifying, target, position)
    if drafting is None or verifying is None:
        return None
    return RoundLayout(drafting, verifying, shape.drafting_rows, sum(len(nodes) for nodes in shape.sources))


def put_round(
    numbers: np.ndarray,
    shape: RoundShape,
    layout: RoundLayout,
    rows: RoundRows,
    configs: tuple[DecoderConfig, DecoderConfig],
    spares: tuple[int, int],
    position: int,
) -> None:
    """Writes all numbers but the parameters of picks, for a text that ends at this position. The drafter's come first
    in `configs` and `spares`."""
    entry, reread = position - rows.skipped, shape.drafting.rows[0]
    first = numbers[layout.first_features : layout.later_features]
    first[:reread] = rows.slots[position - reread : position]
    first[reread:] = -1  # padding rows have no features
    codes = shape.features
    chained = rows.draft_slots[entry + codes * (codes < CHAIN)]
    numbers[layout.later_features : layout.works] = np.where(codes < CHAIN, chained, spares[0] + 1 + codes - CHAIN)
    at = _put_passes(numbers, layout.works, entry, rows.draft_slots, rows.draft_table, shape.drafting, layout.drafting,
                     configs[0], spares[0])  # fmt: skip
    _put_passes(numbers, at, position, rows.slots, rows.table, shape.verifying, layout.verifying, configs[1], spares[1])


def _put_passes(
    numbers: np.ndarray,
    at: int,
    base: int,
    slots: np.ndarray,
    table: np.ndarray,
    relative: Relative,
    passes: Passes,
    config: DecoderConfig,
    spare: int,
) -> int:
    group = config.heads // config.kv_heads
    window = max(config.windows) if all(config.windows) else 0
    widths, pieces, tiles = passes.arrays
    ends: int = numbers_of_round(
        numbers,
        at,
        base,
        slots,
        table,
        spare,
        tiles // group,
        window,
        widths,
        pieces,
        relative.starts,
        relative.offsets,
        relative.codes,
        relative.lengths,
        relative.path_starts,
        relative.paths,
        relative.drafted,
    )
    return ends
