"""On real logits: the sampling rules keep the target's distribution under a ladder of the shipped drafts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from hierspec import Sampling
from hierspec.core.engine import Engine
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import adjust, distribution
from hierspec.core.stats import TierStats

pytestmark = pytest.mark.model

PROMPT = "Name a colour."
SAMPLING = Sampling(max_tokens=3, temperature=1.0, top_k=6)
REQUESTS = 400
BATCH = 8  # requests that run together; each batch reuses the prefix cache of the one before
SIGNIFICANCE = 1e-6
MIN_EXPECTED = 5.0  # in a cell of chi-square


def next_distribution(model, scorer, written):
    """The exact distribution of the token after prompt and output, from the scorer's logits."""
    request = model.request(model.encode(PROMPT), "plain", replace(SAMPLING, seed=0))
    context = np.array([*request.prompt, *written], np.int32)
    ask = Ask(scorer, context, Proposal(), request, 1, True, TierStats(""))
    with torch.inference_mode():
        logits = scorer.logits([ask])[0].double().cpu().numpy()
    scorer.release(request)
    request.cancel()
    return distribution(adjust(logits, context, len(request.prompt), SAMPLING), SAMPLING)


def chi_square(counts, probabilities):
    """The statistic and its degrees of freedom. Rare tokens share a cell; an impossible one makes it infinite."""
    total = sum(counts.values())
    expected = {token: total * probabilities[token] for token in np.flatnonzero(probabilities).tolist()}
    if set(counts) - set(expected):
        return np.inf, 1
    cells = [(counts[token], mean) for token, mean in expected.items() if mean >= MIN_EXPECTED]
    rare = [(counts[token], mean) for token, mean in expected.items() if mean < MIN_EXPECTED]
    if rare and sum(mean for _, mean in rare) >= MIN_EXPECTED:
        cells.append((sum(count for count, _ in rare), sum(mean for _, mean in rare)))
    return sum((count - mean) ** 2 / mean for count, mean in cells), max(len(cells) - 1, 1)


def p_value(statistic, freedom):
    """The probability of a statistic at least so large if the distribution is right."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double()))


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_ladders_keep_the_targets_distribution(default_model, rule):
    plan = replace(default_model.plan("hsd-residual"), rule=rule)
    prompt = default_model.encode(PROMPT)
    outputs, accepted, rejected = [], 0, 0
    for start in range(0, REQUESTS, BATCH):
        requests = [
            default_model.request(prompt, plan, replace(SAMPLING, seed=seed)) for seed in range(start, start + BATCH)
        ]
        for _ in Engine().run(requests):
            pass
        outputs += [tuple(request.output) for request in requests]
        for request in requests:
            counters = request.stats.tiers[0]
            accepted += sum(counters.accepted.values())
            rejected += sum(counters.proposed.values()) - sum(counters.accepted.values())
    assert accepted > REQUESTS / 10
    assert rejected > REQUESTS / 10

    target, drafter = (tier.scorer for tier in default_model.hierarchy(plan).tiers[:2])
    first = Counter(output[0] for output in outputs)
    most_frequent = first.most_common(1)[0][0]
    second = Counter(output[1] for output in outputs if output[0] == most_frequent and len(output) > 1)
    first_statistic, first_freedom = chi_square(first, next_distribution(default_model, target, []))
    second_statistic, second_freedom = chi_square(second, next_distribution(default_model, target, [most_frequent]))
    assert first_freedom > 1
    assert second_freedom > 1
    statistic, freedom = first_statistic + second_statistic, first_freedom + second_freedom
    assert p_value(statistic, freedom) > SIGNIFICANCE, (statistic, freedom)
    # The test has power: it rejects the drafter's distribution, restricted to tokens that the drafter can write.
    draft = next_distribution(default_model, drafter, [])
    possible = Counter({token: count for token, count in first.items() if draft[token] > 0})
    restricted = np.where([token in possible for token in range(len(draft))], draft, 0)
    assert p_value(*chi_square(possible, restricted / restricted.sum())) < SIGNIFICANCE
