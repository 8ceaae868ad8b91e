"""Are two outputs the same, and if not, how near was the choice where they differ?"""

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

# Gap between two scores below which rounding may decide: a few units in the last place of a logit in each dtype.
TIES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.5}


@dataclass(frozen=True)
class Difference:
    """The first position where two outputs differ, and how near the target's choice was there."""

    position: int  # in the output
    tokens: tuple[int | None, int | None]  # None: that output had ended
    gap: float  # between the two best scores (logits; with the noise added where sampled)
    is_tie: bool  # both tokens score so near the best that rounding may decide between them

    def __str__(self) -> str:
        kind = "a tie that rounding decides" if self.is_tie else "NOT a tie"
        return f"differs at token {self.position}: {self.tokens[0]} or {self.tokens[1]}, gap {self.gap:.2e}, {kind}"


def first_difference(
    model: LanguageModel,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    sampling: Sampling,
    seed: int,
) -> Difference | None:
    """None if the outputs are the same. Otherwise one plain pass over what they share shows how near it was."""
    if list(first) == list(second):
        return None
    shared = min(len(first), len(second))
    position = next((i for i in range(shared) if first[i] != second[i]), shared)
    tokens = tuple(output[position] if position < len(output) else None for output in (first, second))
    scores = next_scores(model, prompt, first[:position], sampling, seed)
    best, runner_up = scores.topk(2).values.tolist()

    def near(token: int | None) -> bool:
        scored = token is not None and token < len(scores)  # another engine may write ids that have no row here
        return scored and best - float(scores[token]) < TIES[model.dtype]

    return Difference(position, (tokens[0], tokens[1]), best - runner_up, near(tokens[0]) and near(tokens[1]))


def next_scores(
    model: LanguageModel, prompt: Sequence[int], output: Sequence[int], sampling: Sampling, seed: int
) -> torch.Tensor:
    """[vocabulary]: the target's score of every token after prompt and output. The best one is written."""
    request = model.request(list(prompt), "plain", replace(sampling, seed=seed))
    scorer = model.scorer(model.config.layers)
    context = np.array([*prompt, *output], np.int32)
    ask = Ask(scorer, context, Proposal(), request, 1, False, TierStats("target"))
    try:
        with model.turn(), torch.inference_mode():
            return perturbed(scorer.logits([ask]), ask)[0].float()
    finally:
        request.cancel()
