"""The shape of a draft before its tokens are known: the chain, and beside it what is most likely to be accepted."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.draft_tree import _RUNNERS_UP, DraftTree, likely_tree
from hierspec.core.proposal import Proposal

SIZES = st.integers(1, 40), st.integers(1, 8), st.integers(1, 6)
RATES = st.floats(0, 1)
FEW = settings(max_examples=150, deadline=None, derandomize=True)
ROUNDING = 1e-12

Path = tuple[int, ...]


def rates_of(candidates: int, rate: float) -> list[float]:
    """How often each of a drafter's picks is accepted."""
    return [rate, *((1 - rate) * share for share in _RUNNERS_UP)][:candidates]


def probability(path: Path, rates: list[float]) -> float:
    return math.prod(rates[rank] for rank in path)


def paths_of(tree: DraftTree) -> list[Path]:
    """The ranks down to each node."""
    paths: dict[int, Path] = {-1: ()}
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        paths[node] = (*paths[parent], rank)
    return [paths[node] for node in range(len(tree.parents))]


@FEW
@given(*SIZES, RATES)
def test_parents_come_first_and_the_chain_before_all_others(nodes, depth, candidates, rate):
    tree = likely_tree(nodes, depth, candidates, rate)
    assert tree.depth == min(depth, nodes) == 1 + max(tree.depths)
    for level in range(tree.depth):
        assert (tree.parents[level], tree.ranks[level], tree.depths[level]) == (level - 1, 0, level)
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert list(tree.depths) == Proposal((0,) * len(tree.parents), tree.parents).depths()
    beside = tree.depths[tree.depth :]
    assert list(beside) == sorted(beside)


@FEW
@given(*SIZES, RATES)
def test_siblings_are_different_picks_and_all_nodes_are_there(nodes, depth, candidates, rate):
    tree = likely_tree(nodes, depth, candidates, rate)
    places = list(zip(tree.parents, tree.ranks, strict=True))
    assert len(set(places)) == len(places)
    picks = len(rates_of(candidates, rate))
    assert all(0 <= rank < picks for rank in tree.ranks)
    possible = sum(picks**level for level in range(1, tree.depth + 1))
    assert len(tree.parents) == len(tree.ranks) == len(tree.depths) == min(nodes, possible)


@FEW
@given(*SIZES, RATES)
def test_no_node_is_left_out_for_a_less_likely_one(nodes, depth, candidates, rate):
    tree, rates = likely_tree(nodes, depth, candidates, rate), rates_of(candidates, rate)
    paths = paths_of(tree)
    chosen = set(paths)
    least = min((probability(path, rates) for path in paths[tree.depth :]), default=math.inf)
    for path in ((), *paths):
        left_out = [(*path, rank) for rank in range(len(rates)) if len(path) < tree.depth]
        for each in set(left_out) - chosen:  # what follows it is no more likely than itself
            if len(paths) > tree.depth:
                assert probability(each, rates) <= least + ROUNDING
            else:
                assert len(paths) == nodes  # there is room for the chain alone


@FEW
@given(*SIZES, RATES)
def test_as_many_nodes_are_expected_as_their_paths_add_up_to(nodes, depth, candidates, rate):
    tree, rates = likely_tree(nodes, depth, candidates, rate), rates_of(candidates, rate)
    assert tree.expected == pytest.approx(sum(probability(path, rates) for path in paths_of(tree)))


@pytest.mark.parametrize(("depth", "candidates"), [(1, 4), (2, 3), (3, 2), (5, 1)])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.7, 1.0])
def test_no_other_tree_with_the_same_chain_has_more(depth, candidates, rate):
    """All trees of every size, one by one."""
    rates = rates_of(candidates, rate)
    chain = [(0,) * level for level in range(1, depth + 1)]
    levels = (product(range(candidates), repeat=level) for level in range(1, depth + 1))
    beside = [path for level in levels for path in level if any(path)]
    for more in range(len(beside) + 1):
        best = 0.0
        for others in combinations(beside, more):
            tree = {(), *chain, *others}
            if all(path[:-1] in tree for path in others):
                best = max(best, sum(probability(path, rates) for path in (*chain, *others)))
        assert likely_tree(depth + more, depth, candidates, rate).expected == pytest.approx(best)


@FEW
@given(*SIZES, RATES)
def test_the_nodes_that_have_children_are_continued(nodes, depth, candidates, rate):
    tree = likely_tree(nodes, depth, candidates, rate)
    children = Proposal((0,) * len(tree.parents), tree.parents).children()
    for level in range(depth + 1):
        of_level = [node for node in range(len(tree.parents)) if tree.depths[node] == level]
        assert tree.continued(level) == tuple(node for node in of_level if children[node + 1])


def test_equal_arguments_give_the_same_tree():
    """A device keeps what it has prepared for a shape by the shape itself."""
    assert likely_tree(15, 5, 3, 0.7) is likely_tree(15, 5, 3, 0.7)
    assert likely_tree(15, 5, 3, 0.7) != likely_tree(15, 5, 3, 0.5)


def test_a_sure_drafter_gets_a_chain_and_an_unsure_one_width():
    sure, unsure = likely_tree(12, 4, 4, 0.95), likely_tree(12, 4, 4, 0.3)
    assert sum(depth == 0 for depth in sure.depths) < sum(depth == 0 for depth in unsure.depths) == 4
    assert sure.expected > unsure.expected
