"""Which layers a model can skip when it drafts for itself (Draft & Verify): a search, no training.

The model answers prompts by plain decoding. Then it runs over those answers without some layers: its agreement is how
often its best token is the answer's. Layers are removed one by one, the one that costs the least agreement first. The
result is the set, of all on the way, that is predicted to be fastest from its agreement and the costs of passes here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hierspec.assembly.measured_costs import measure
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Ask
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
from hierspec.language_model import LanguageModel
from hierspec.pacing.costs import Costs
from hierspec.progress import Progress, silent
from hierspec.prompt_ids import Prompt
from hierspec.scorers.base import ModelScorer
from hierspec.scorers.skipping import skipping_scorer
from hierspec.scorers.timing import PassTimer

_NEAR = 8  # layers that later steps try: those that mattered least in the step before
_LONGEST = 8  # longest draft
_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "A train leaves at 9:40 and arrives at 12:15. How long does the journey take?",
    "List five ways to save water at home.",
)


@dataclass(frozen=True)
class Draft:
    """The model without some layers: its agreement, and how fast a plan with it should be."""

    skipped: tuple[int, ...]
    agreement: float
    gather: int
    speedup: float  # over plain decoding, predicted

    def plan(self, model: str | None = None) -> Plan:
        return Plan(model, budget=max(7, self.gather), tiers=(TierPlan(skip_layers=self.skipped, gather=self.gather),))


@dataclass(frozen=True)
class Text:
    prompt: list[int]
    answer: list[int]  # the model's own, greedy


def calibration(
    model: LanguageModel, prompts: Sequence[Prompt] = _PROMPTS, max_tokens: int = 64, progress: Progress = silent
) -> list[Text]:
    """The model's own answers."""
    texts = []
    for number, prompt in enumerate(prompts, 1):
        ids = model.encode(prompt)
        texts.append(Text(ids, list(model.generate(ids, max_tokens=max_tokens).tokens)))
        progress("Answering", number, len(prompts))
    return [text for text in texts if text.answer]


def search(model: LanguageModel, texts: Sequence[Text], progress: Progress = silent) -> list[Draft]:
    """The best set of every size up to three quarters of the layers, the fastest first."""
    layers = model.config.layers
    if not texts or layers < 2:
        raise HierspecError("There is nothing to search with; give prompts that the model answers, and layers to skip.")
    costs, layers_share = _costs(model)
    most = min(layers - 1, max(1, 3 * layers // 4))
    steps = layers + (most - 1) * _NEAR
    skipped: tuple[int, ...] = ()
    order, drafts, done = list(range(layers)), [], 0
    for size in range(1, most + 1):
        tried = [layer for layer in order if layer not in skipped][: layers if size == 1 else _NEAR]
        by_layer = {}
        for layer in tried:
            by_layer[layer] = agreement(model, (*skipped, layer), texts)
            done += 1
            progress("Searching", done, steps)
        ranked = sorted(tried, key=lambda layer: -by_layer[layer])
        order = ranked + [layer for layer in order if layer not in by_layer]
        skipped = tuple(sorted((*skipped, ranked[0])))
        seconds = costs.seconds(1) * (layers_share * (layers - size) / layers + 1 - layers_share)
        drafts.append(predicted(skipped, by_layer[ranked[0]], seconds, costs))
    progress("Searching", steps, steps)
    return sorted(drafts, key=lambda draft: -draft.speedup)


def agreement(model: LanguageModel, skipped: Collection[int], texts: Sequence[Text]) -> float:
    """The share of the answers' tokens that are also the best choice of the model without these layers."""
    scorer = skipping_scorer(model.decoder, skipped, model.kv_memory)
    agreed = total = 0
    for text in texts:
        agreed += int((_choices(scorer, text) == text.answer).sum())
        total += len(text.answer)
    return agreed / total


def predicted(skipped: tuple[int, ...], agreement: float, seconds: float, costs: Costs) -> Draft:
    """The draft with the length n that should be fastest.

    n passes of the draft and one of the target write (1 - a^(n+1)) / (1 - a) tokens at an agreement of a.
    """
    best = Draft(skipped, agreement, 1, 0.0)
    for gather in range(1, _LONGEST + 1):
        tokens = sum(agreement**depth for depth in range(gather + 1))
        speedup = costs.seconds(1) * tokens / (gather * seconds + costs.seconds(1 + gather))
        if speedup > best.speedup:
            best = Draft(skipped, agreement, gather, speedup)
    return best


def _choices(scorer: ModelScorer, text: Text) -> np.ndarray:
    """The best token at each position of the answer, all in one pass."""
    request = Request(text.prompt, Sampling(), Hierarchy((Tier(scorer),)))
    context, rest = np.array(text.prompt, np.int32), Proposal.chain(text.answer[:-1])
    ask = Ask(scorer, context, rest, request, 1, False, TierStats(scorer.name))
    try:
        with torch.inference_mode():
            choices: np.ndarray = scorer.logits([ask]).argmax(dim=1).cpu().numpy()
        return choices
    finally:
        request.cancel()


def _costs(model: LanguageModel) -> tuple[Costs, float]:
    """Costs of the target's passes, and the share of the layers in a pass over one token."""
    target = model.scorer(model.config.layers)
    costs = measure(target)
    timer = PassTimer(target, np.arange(64, dtype=np.int32) % model.config.vocabulary)
    parts = np.min([timer.run(np.array([1], np.int32)) for _ in range(5)], axis=0)
    timer.close()
    return costs, float(parts[0] / parts.sum())
