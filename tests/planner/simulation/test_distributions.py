"""Ladders sampled from recorded distributions accept what the rules themselves accept, and 1 - TV is what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hierspec.core.interfaces import Answer
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import Dice
from hierspec.core.verify import RULES
from hierspec.planner.simulation.acceptance import TARGET
from hierspec.planner.simulation.distribution_acceptance import expected_acceptance
from hierspec.planner.simulation.distributions import ladder_picks
from hierspec.planner.simulation.traces import TokenDistributions, Trace, load_traces, save_traces

VOCABULARY, LENGTH, TEXTS = 6, 4, 1500


def some_distributions(seed: int) -> np.ndarray:
    """[positions, vocabulary]: they do not depend on the text, so whatever is drafted has the same ones."""
    weights = np.random.default_rng(seed).gamma(0.7, size=(LENGTH + 1, VOCABULARY)) + 1e-3
    return weights / weights.sum(1, keepdims=True)


def recorded(distributions: np.ndarray) -> TokenDistributions:
    tokens = np.tile(np.arange(VOCABULARY, dtype=np.int32), (1, LENGTH, 1))
    return TokenDistributions(tokens, distributions[None, :LENGTH].astype(np.float32))


def traces(p: np.ndarray, below: dict[str, np.ndarray]) -> list[Trace]:
    along = {TARGET: recorded(p)} | {name: recorded(q) for name, q in below.items()}
    rng = np.random.default_rng(5)
    texts = [tuple(int(rng.choice(VOCABULARY, p=row)) for row in p[:LENGTH]) for _ in range(TEXTS)]
    return [Trace("a", (0,), text, {}, 1.0, seed, distributions=along) for seed, text in enumerate(texts)]


def leading_equal(drafted: np.ndarray, written: np.ndarray) -> int:
    return int(np.cumprod(drafted == written).sum())


def accepted_by_the_rule(rule: str, p: np.ndarray, q: np.ndarray) -> list[int]:
    """How many of a block's tokens are accepted, by the rule itself."""
    rng, accepted = np.random.default_rng(11), []
    for seed in range(TEXTS):
        tokens = tuple(int(rng.choice(VOCABULARY, p=row)) for row in q[:LENGTH])
        proposal = Proposal(tokens, tuple(range(-1, LENGTH - 1)), distributions=tuple(q[:LENGTH]))
        accepted.append(len(RULES[rule](proposal, Answer(distributions=p), Dice(seed), 1).accepted))
    return accepted


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_a_sampled_draft_is_accepted_as_by_the_rule(rule: str) -> None:
    p, q = some_distributions(1), some_distributions(2)
    by_rule = np.bincount(accepted_by_the_rule(rule, p, q), minlength=LENGTH + 1) / TEXTS
    counts = []
    for trace in traces(p, {"draft": q}):
        [picks] = ladder_picks(trace, ["draft"], TARGET, rule)
        # A block that begins with the text: its token at position k is k deep.
        drafted = np.array([picks.at(depth if rule == "block" else 0)[depth, 0] for depth in range(LENGTH)])
        counts.append(leading_equal(drafted, np.array(trace.output)))
    sampled = np.bincount(counts, minlength=LENGTH + 1) / TEXTS
    assert sampled == pytest.approx(by_rule, abs=0.05)
    if rule == "block":  # joint acceptance gains: more than the product of the single rates
        alone = np.bincount(accepted_by_the_rule("residual", p, q), minlength=LENGTH + 1) / TEXTS
        assert by_rule @ np.arange(LENGTH + 1) > alone @ np.arange(LENGTH + 1)


def test_the_rates_of_all_pairs_are_one_minus_the_distance() -> None:
    p, middle, low = some_distributions(1), some_distributions(2), some_distributions(3)
    accepted = expected_acceptance(traces(p, {"middle": middle, "low": low})[:200], "residual")
    named = {TARGET: p, "middle": middle, "low": low}
    for drafter, verifier in (("middle", TARGET), ("low", TARGET), ("low", "middle"), ("middle", "low")):
        shared = np.minimum(named[drafter][:LENGTH], named[verifier][:LENGTH]).sum(1)
        assert accepted.count(drafter, verifier, depth=0).rate == pytest.approx(shared.mean(), abs=1e-6)
    counted = accepted.by_middle_tier["low", "middle", TARGET]
    both = counted.accepted.accepted + counted.corrected.accepted
    shared = np.minimum(p[:LENGTH], middle[:LENGTH]).sum(1)
    assert both / (200 * LENGTH) == pytest.approx(shared.mean(), abs=0.05)


def test_a_ladder_of_three_is_sampled_from_the_top() -> None:
    """Each tier agrees with the one above it as often as the two distributions allow."""
    p, middle, low = some_distributions(1), some_distributions(2), some_distributions(3)
    same = []
    for trace in traces(p, {"middle": middle, "low": low}):
        upper, lower = ladder_picks(trace, ["middle", "low"], TARGET, "residual")
        same.append(upper.first(0) == lower.first(0))
    assert np.mean(same) == pytest.approx(np.minimum(middle[:LENGTH], low[:LENGTH]).sum(1).mean(), abs=0.03)


def test_distributions_are_kept_with_their_traces(tmp_path: Path) -> None:
    [trace] = traces(some_distributions(1), {"draft": some_distributions(2)})[:1]
    save_traces(tmp_path / "traces.safetensors", [trace])
    [read] = load_traces(tmp_path / "traces.safetensors")
    assert list(read.distributions) == [TARGET, "draft"]
    for name, before in trace.distributions.items():
        assert np.array_equal(read.distributions[name].probabilities, before.probabilities)
        assert np.array_equal(read.distributions[name].tokens, before.tokens)
