"""The shape of drafts that are made and verified in one call: the most tokens for its time, by measured costs."""

from __future__ import annotations

from hierspec.core.draft_tree import DraftTree, likely_tree
from hierspec.pacing.costs import Costs

# How often the best pick of a feature drafter is accepted, roughly.
ACCEPTED_GREEDY, ACCEPTED_SAMPLED = 0.7, 0.5
_SIZES = (7, 15, 31)  # nodes: with the last token of the text as many rows as kernels multiply at once
_DEEPEST = 7


def round_tree(above: Costs, own: Costs, budget: int, depth: int, candidates: int, rate: float) -> DraftTree:
    """The best tree within a budget of nodes and a depth, for these costs of verifying passes and drafted tokens."""
    if not above.seconds(1):
        return likely_tree(min(_SIZES[1], budget), min(depth, 5), candidates, rate)

    def speed(tree: DraftTree) -> float:
        return (1 + tree.expected) / (above.seconds(1 + len(tree.parents)) + tree.depth * own.seconds(1))

    sizes = {min(size, budget) for size in _SIZES}
    trees = [
        likely_tree(nodes, each, candidates, rate) for nodes in sizes for each in range(1, min(depth, _DEEPEST) + 1)
    ]
    return max(trees, key=speed)
