"""Branches of a draft: what a drafter would write after the runners-up of its tokens.

A pass of 16 rows takes as long as one of a single row, so the passes that write a draft's chain write these too. Which
row continues which pick does not depend on the tokens: the host knows all slots and paths before the first pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from hierspec.backends.cuda.memory import PAGE

MOST_BRANCHED = 16  # rows of a pass: the chain's and those of branches
_CONTINUED = 2  # runners-up of a token that are continued; further ones are seldom right


@dataclass(frozen=True, eq=False)
class BranchedPass:
    """The rows of one pass, the chain's first. Slots are numbered: those of the chain, then those of branches."""

    sources: np.ndarray  # row of the pass before whose pick it continues
    ranks: np.ndarray  # which of its picks: 0 is the best
    slots: np.ndarray
    features: np.ndarray  # slot of its source row; -1: of the last token before the draft
    path_starts: np.ndarray
    paths: np.ndarray  # slots of the draft that a row sees, its own last


@dataclass(frozen=True, eq=False)
class Branched:
    passes: tuple[BranchedPass, ...]
    firsts: tuple[int, ...]  # number of each pass's first row, counted over all passes; 0 is the pass before them
    rows: int  # of all passes, the one before them included
    branches: dict[tuple[int, int], int]  # pass whose token it continues and rank there -> row in the passes after it


def runners_up(candidates: int) -> int:
    """How many of them are continued, if a token has that many candidates."""
    return min(candidates - 1, _CONTINUED)


@cache
def branched(passes: int, continued: int) -> Branched:
    """`passes` passes after the first one, where each token of the chain has this many continued runners-up."""
    made, firsts, rows, branches = [], [], 1, {}
    used = passes  # slots with a number so far
    paths: list[list[int]] = [[]]  # of each row of the pass before
    for number in range(passes):
        sources = [(row, 0) for row in range(len(paths))]
        sources += [(0, rank) for rank in range(1, continued + 1) if len(paths) + rank <= MOST_BRANCHED]
        room = passes + PAGE - 1 - used  # the spare page's first slot is for padding rows
        sources = sources[: 1 + room]
        for row, (_, rank) in enumerate(sources):
            if rank:
                branches[number, rank] = row
        slots = [number, *range(used, used + len(sources) - 1)]
        used += len(sources) - 1
        features = [paths[source][-1] if paths[source] else -1 for source, _ in sources]
        paths = [[*paths[source], slot] for (source, _), slot in zip(sources, slots, strict=True)]
        made.append(
            BranchedPass(
                np.array([source for source, _ in sources]),
                np.array([rank for _, rank in sources]),
                np.array(slots),
                np.array(features),
                np.cumsum([0, *map(len, paths)]),
                np.array([slot for path in paths for slot in path]),
            )
        )
        firsts.append(rows)
        rows += len(sources)
    return Branched(tuple(made), tuple(firsts), rows, branches)
