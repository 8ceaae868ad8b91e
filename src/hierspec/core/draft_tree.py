"""The shape of a draft before its tokens are known: for devices that draft and verify without asking the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush

_RUNNERS_UP = (0.5, 0.2, 0.1)  # how often each is right where a drafter's best pick is not


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Nodes as in a proposal: first the chain of best picks, then what stands beside it, by depth."""

    parents: tuple[int, ...]  # -1: directly after the context
    ranks: tuple[int, ...]  # which of the drafter's picks after its parent: 0 is the best
    depths: tuple[int, ...]  # 0 is the position right after the context
    depth: int  # tokens of the chain: the longest path
    expected: float  # nodes that should be accepted

    def continued(self, depth: int) -> tuple[int, ...]:
        """The nodes of this depth that have children."""
        return tuple(sorted({parent for parent in self.parents if parent >= 0 and self.depths[parent] == depth}))


@cache
def likely_tree(nodes: int, depth: int, candidates: int, rate: float) -> DraftTree:
    """The most probable nodes, no deeper than the chain of `depth` tokens, with `candidates` picks after each node.

    `rate`: how often the drafter's best pick is accepted.
    """
    rates = (rate, *((1 - rate) * share for share in _RUNNERS_UP))[:candidates]
    depth = min(depth, nodes)
    chosen: list[tuple[int, ...]] = [(0,) * (level + 1) for level in range(depth)]  # ranks along each path
    probability = {(): 1.0} | {path: rate ** len(path) for path in chosen}

    def beside(path: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        """What may follow this path and is not part of the chain."""
        after = [(*path, rank) for rank in range(len(rates))] if len(path) < depth else []
        return [(-probability[path] * rates[each[-1]], each) for each in after if any(each)]

    waiting = [each for path in ((), *chosen) for each in beside(path)]
    heapify(waiting)
    while waiting and len(chosen) < nodes:
        negative, path = heappop(waiting)
        probability[path] = -negative
        chosen.append(path)
        for each in beside(path):
            heappush(waiting, each)
    chosen[depth:] = sorted(chosen[depth:], key=lambda path: (len(path), path))
    number = {(): -1} | {path: node for node, path in enumerate(chosen)}
    return DraftTree(
        tuple(number[path[:-1]] for path in chosen),
        tuple(path[-1] for path in chosen),
        tuple(len(path) - 1 for path in chosen),
        depth,
        sum(probability[path] for path in chosen),
    )
