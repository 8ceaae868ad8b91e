"""Which row of a pass continues which pick: slots and paths of branches, by hand and by walking back."""

import pytest

from hierspec.backends.cuda.branches import MOST_BRANCHED, branched, runners_up
from hierspec.backends.cuda.memory import PAGE


def test_two_passes_with_one_runner_up_each():
    tree = branched(2, 1)
    first, second = tree.passes
    assert (first.sources.tolist(), first.ranks.tolist()) == ([0, 0], [0, 1])
    assert (first.slots.tolist(), first.features.tolist()) == ([0, 2], [-1, -1])
    assert (first.path_starts.tolist(), first.paths.tolist()) == ([0, 1, 2], [0, 2])
    assert (second.sources.tolist(), second.ranks.tolist()) == ([0, 1, 0], [0, 0, 1])
    assert (second.slots.tolist(), second.features.tolist()) == ([1, 3, 4], [0, 2, 0])
    assert (second.path_starts.tolist(), second.paths.tolist()) == ([0, 2, 4, 6], [0, 1, 2, 3, 0, 4])
    assert (tree.firsts, tree.rows, tree.branches) == ((1, 3), 6, {(0, 1): 1, (1, 1): 2})


@pytest.mark.parametrize("passes", range(8))
@pytest.mark.parametrize("continued", range(3))
def test_every_row_sees_the_tokens_it_continues(passes, continued):
    tree = branched(passes, continued)
    assert len(tree.passes) == len(tree.firsts) == passes
    used, before = set(), [[]]
    for number, each in enumerate(tree.passes):
        assert 1 <= len(each.slots) <= MOST_BRANCHED
        assert not used & set(each.slots.tolist())
        used |= set(each.slots.tolist())
        seen = []
        for row, slot in enumerate(each.slots.tolist()):
            path = each.paths[each.path_starts[row] : each.path_starts[row + 1]].tolist()
            assert path == [*before[each.sources[row]], slot]
            assert each.features[row] == (path[-2] if number else -1)
            assert each.ranks[row] == 0 or each.sources[row] == 0
            seen.append(path)
        before = seen
        assert each.slots[0] == number
        assert each.ranks[0] == 0
    assert used <= set(range(passes + PAGE - 1))
    assert tree.rows == 1 + sum(len(each.slots) for each in tree.passes)
    for (step, rank), row in tree.branches.items():
        assert tree.passes[step].ranks[row] == rank
        assert all(each.sources[row] == row for each in tree.passes[step + 1 :])


def test_few_runners_up_are_continued():
    assert [runners_up(candidates) for candidates in (1, 2, 3, 8)] == [0, 1, 2, 2]
