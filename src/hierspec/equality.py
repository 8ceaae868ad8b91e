"""Are two outputs the same, and if not, how near was the choice where they part?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hierspec.backends.torch.pick import perturbed
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
from hierspec.language_model import LanguageModel

# Gap of the two best scores under which rounding may decide: a few steps of a logit's last digit in each dtype.
TIES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.5}


@dataclass(frozen=True)
class Difference:
    """Where two outputs part: the tokens that each wrote there, and what the target says of that place."""

    position: int  # in the output
    tokens: tuple[int | None, int | None]  # None: that output had ended
    gap: float  # between the two best scores (logits; with the noise added where sampled)
    is_tie: bool  # both tokens are so near the best that rounding may decide between them

    def __str__(self) -> str:
        kind = "a tie that rounding decides" if self.is_tie else "NOT a tie"
        return f"differs at token {self.position}: {self.tokens[0]} or {self.tokens[1]}, gap {self.gap:.2e}, {kind}"


def first_difference(
    model: LanguageModel, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], sampling: Sampling, seed: int
) -> Difference | None:
    """None where the outputs are the same. Otherwise one plain pass over what they share tells how near it was."""
    if list(one) == list(other):
        return None
    place = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        place = min(len(one), len(other))
    mine, theirs = (output[place] if place < len(output) else None for output in (one, other))
    scores = next_scores(model, prompt, one[:place], sampling, seed)
    best, second = scores.topk(2).values.tolist()

    def near(token: int | None) -> bool:
        known = token is not None and token < len(scores)  # another program may write what we have no row for
        return known and best - float(scores[token]) < TIES[model.dtype]

    return Difference(place, (mine, theirs), best - second, near(mine) and near(theirs))


def next_scores(
    model: LanguageModel, prompt: Sequence[int], output: Sequence[int], sampling: Sampling, seed: int
) -> torch.Tensor:
    """What the target says of every token after prompt and output; the largest is written. [vocabulary]"""
    request = model.request(list(prompt), "plain", replace(sampling, seed=seed))
    scorer = model.scorer(model.config.layers)
    context = np.array([*prompt, *output], np.int32)
    ask = Ask(scorer, context, Proposal(), request, 1, False, TierStats("target"))
    try:
        with torch.inference_mode():
            return perturbed(scorer.logits([ask]), ask)[0].float()
    finally:
        request.cancel()
