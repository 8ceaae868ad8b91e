"""On real logits: what rules that draw write under a ladder of the shipped drafts has the target's own law."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from hierspec import Sampling
from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Ask
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import adjust, distribution
from hierspec.core.stats import TierStats

pytestmark = pytest.mark.model

PROMPT = "Name a colour."
SAMPLING = Sampling(max_tokens=3, temperature=1.0, top_k=6)
REQUESTS = 304
SIDE_BY_SIDE = 8  # so that what ended leaves its states of the prompt to the next
UNLIKELY = 1e-6
FEWEST = 5.0  # expected in a cell of chi-square


def next_law(model, scorer, written):
    """The exact law of the token after prompt and output, from the scorer's logits."""
    request = model.request(model.encode(PROMPT), "plain", replace(SAMPLING, seed=0))
    context = np.array([*request.prompt, *written], np.int32)
    ask = Ask(scorer, context, Proposal(), request, 1, True, TierStats(""))
    with torch.inference_mode():
        logits = scorer.logits([ask])[0].double().cpu().numpy()
    scorer.release(request)
    request.cancel()
    return distribution(adjust(logits, context, len(request.prompt), SAMPLING), SAMPLING)


def chi_square(counts, expected_law):
    """The statistic and its degrees of freedom; rare tokens share a cell, and impossible ones are infinitely far."""
    total = sum(counts.values())
    expected = {token: total * expected_law[token] for token in np.flatnonzero(expected_law).tolist()}
    if set(counts) - set(expected):
        return np.inf, 1
    cells = [(counts[token], share) for token, share in expected.items() if share >= FEWEST]
    rare = [(counts[token], share) for token, share in expected.items() if share < FEWEST]
    if rare and sum(share for _, share in rare) >= FEWEST:
        cells.append((sum(count for count, _ in rare), sum(share for _, share in rare)))
    return sum((count - share) ** 2 / share for count, share in cells), max(len(cells) - 1, 1)


def chance_of(statistic, freedom):
    """That a statistic is at least so large where the law is right."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double()))


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_ladders_write_the_targets_law(default_model, rule):
    plan = replace(default_model.plan("hsd"), rule=rule)
    prompt = default_model.encode(PROMPT)
    outputs, stood, refused = [], 0, 0
    for start in range(0, REQUESTS, SIDE_BY_SIDE):
        requests = [
            default_model.request(prompt, plan, replace(SAMPLING, seed=seed))
            for seed in range(start, start + SIDE_BY_SIDE)
        ]
        for _ in Engine().run(requests):
            pass
        outputs += [tuple(request.output) for request in requests]
        for request in requests:
            [target, *_] = request.stats.tiers
            stood += sum(target.accepted.values())
            refused += sum(target.proposed.values()) - sum(target.accepted.values())
    assert stood > REQUESTS / 10
    assert refused > REQUESTS / 10

    whole, drafter = (tier.scorer for tier in default_model.hierarchy(plan).tiers[:2])
    first = Counter(output[0] for output in outputs)
    likeliest = first.most_common(1)[0][0]
    second = Counter(output[1] for output in outputs if output[0] == likeliest and len(output) > 1)
    statistic, freedom = chi_square(first, next_law(default_model, whole, []))
    more, further = chi_square(second, next_law(default_model, whole, [likeliest]))
    assert freedom > 1
    assert further > 1
    assert chance_of(statistic + more, freedom + further) > UNLIKELY, (statistic, freedom, more, further)
    # So many requests would have shown another law: the drafter's, among the tokens that it can say.
    guessed = next_law(default_model, drafter, [])
    both = Counter({token: count for token, count in first.items() if guessed[token] > 0})
    among = np.where([token in both for token in range(len(guessed))], guessed, 0)
    assert chance_of(*chi_square(both, among / among.sum())) < UNLIKELY
