"""One chain of several trees: the one that should have most tokens accepted."""

import itertools
import random

from hierspec.core.proposal import NOTHING, Proposal
from hierspec.hosts.chains import best_chain
from hierspec.pacing.acceptance import AcceptanceRates


def rates_of(**rates):
    counts = [(source, -1, -1, 1e9, 1e9 * rate) for source, rate in rates.items()]
    known = AcceptanceRates()
    known.begin_with(counts)
    return known


def naive(proposals, rates, most):
    """Every path of the merged trees, with the sum of the probabilities of its beginnings."""
    paths = {}
    for proposal in proposals:
        for node in range(len(proposal)):
            path = tuple(proposal.path(node))
            rate = rates.rate(proposal.sources[node], proposal.evidence[node], len(path) - 1)
            paths.setdefault(path, paths.get(path[:-1], 1.0) * rate)
    value = {
        path: sum(paths[path[:length]] for length in range(1, len(path) + 1)) for path in paths if len(path) <= most
    }
    return max(value.values(), default=0.0), value


def test_it_is_as_good_as_the_best_of_all_paths():
    rng = random.Random(3)
    rates = rates_of(a=0.8, b=0.5, c=0.3)
    for _ in range(300):
        proposals = []
        for source in rng.sample("abc", rng.randrange(1, 4)):
            size = rng.randrange(1, 9)
            parents = tuple(rng.randrange(-1, node) for node in range(size))
            tokens = tuple(rng.randrange(4) for _ in range(size))
            keys = set(zip(parents, tokens, strict=True))
            if len(keys) == size:
                proposals.append(Proposal(tokens, parents, (source,) * size))
        if not proposals:
            continue
        most = rng.randrange(1, 6)
        best, values = naive(proposals, rates, most)
        chain, gain = best_chain(proposals, rates, most)
        assert abs(gain - best) < 1e-3
        assert chain.parents == tuple(range(-1, len(chain) - 1))
        assert abs(values[chain.tokens] - best) < 1e-3


def test_it_ends_where_a_token_costs_more_than_it_brings():
    rates = rates_of(a=0.8)
    chain = Proposal.chain([1, 2, 3, 4], "a")
    kept = [len(best_chain([chain], rates, 4, [price] * 4)[0]) for price in (0.0, 0.4, 0.5, 0.7, 0.9)]
    assert kept == [4, 3, 2, 1, 0]
    assert best_chain([chain], rates, 4, [1.0] * 4) == (NOTHING, 0.0)
    # A dear first row may be worth it for cheap ones after it.
    assert len(best_chain([chain], rates, 4, [1.0, 0.1, 0.1, 0.1])[0]) == 4


def test_nothing_is_longer_than_the_host_takes():
    chains = [Proposal.chain(range(9), "a"), Proposal.chain(itertools.repeat(1, 9), "b")]
    for most in range(1, 10):
        assert len(best_chain(chains, rates_of(a=0.9, b=0.1), most)[0]) == most
