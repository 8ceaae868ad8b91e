"""Records traces: the target writes, and every candidate for a tier picks along its text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
from hierspec.paths import cache_folder
from hierspec.planner.simulation.traces import NOT_ASKED, VERSION, Picks, Trace, load_traces, save_traces, scorer_key
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec.scorers.drafters import FeatureScorer

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompt_ids import Prompt

DEPTHS = 8  # recorded apart for drafts from their own states; deeper ones are assumed to be like the deepest
CANDIDATES = 3  # the pick and its runners-up
_PROGRESS = "Recording what every tier would pick"
_GROUP = 8  # texts at once: as many staircases as a pool keeps for requests that have ended


def record_traces(
    model: LanguageModel,
    prompts: Sequence[tuple[str, Prompt]],
    tiers: Sequence[TierPlan],
    max_tokens: int = 96,
    sampling: Sampling | None = None,
    progress: Progress = silent,
) -> list[Trace]:
    """One trace for each prompt (its task, and its text, messages or ids), with the picks of all these tiers.

    With a temperature every tier picks with the request's keyed noise, as it would while drafting for it.
    """
    sampling = sampling or Sampling()
    seed = 0 if sampling.seed is None else sampling.seed
    sampling = replace(sampling, max_tokens=max_tokens, seed=seed)
    target, *scorers = scorers_of(model, tiers)
    by_key = {scorer_key(scorer): scorer for scorer in scorers}  # several tiers may mean the same scorer
    hierarchy = Hierarchy((Tier(target), *(Tier(scorer) for scorer in by_key.values())))
    model.forget()  # boundaries of exits may be new: cached positions lack their states
    traces: list[Trace] = []
    for start in range(0, len(prompts), _GROUP):
        group = prompts[start : start + _GROUP]
        texts = [model.encode(prompt) for _, prompt in group]
        plain = Hierarchy((Tier(target),))
        writers = [Request(text, sampling, plain, model.stop_ids, model.config.context) for text in texts]
        for _ in Engine().run(writers):
            written = sum(max_tokens if writer.ended else len(writer.output) for writer in writers)
            # The other half of the progress is asking the tiers.
            progress(_PROGRESS, start * max_tokens + written // 2, len(prompts) * max_tokens)
        requests = [Request(text, sampling, hierarchy, model.stop_ids, model.config.context) for text in texts]
        try:
            for writer, request in zip(writers, requests, strict=True):
                if writer.error is not None:
                    raise writer.error
                request.output = list(writer.output)
            picks = {key: _picks(scorer, requests) for key, scorer in by_key.items()}
        finally:
            for request in requests:
                request.cancel()
        for index, ((task, _), request) in enumerate(zip(group, requests, strict=True)):
            by_tier = {key: of_all[index] for key, of_all in picks.items()}
            prompt, output = tuple(request.prompt.tolist()), tuple(writers[index].output)
            stop_ids = tuple(sorted(request.stop_ids))
            traces.append(Trace(task, prompt, output, by_tier, sampling.temperature, seed, request.limit, stop_ids))
        progress(_PROGRESS, (start + len(group)) * max_tokens, len(prompts) * max_tokens)
    return traces


def cached_traces(
    model: LanguageModel,
    prompts: Sequence[tuple[str, Prompt]],
    tiers: Sequence[TierPlan],
    max_tokens: int = 96,
    sampling: Sampling | None = None,
    progress: Progress = silent,
) -> list[Trace]:
    """The same, from the cache folder if they were recorded before with this model, pack, prompts and sampling."""
    texts = [(task, [int(token) for token in model.encode(prompt)]) for task, prompt in prompts]
    about = _about(model, texts, scorers_of(model, tiers), max_tokens, sampling or Sampling())
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]
    path = cache_folder() / "traces" / f"{key}.safetensors"
    with suppress(HierspecError):  # absent or damaged: record again
        return load_traces(path, about)
    traces = record_traces(model, texts, tiers, max_tokens, sampling, progress)
    with suppress(HierspecError):  # planning must work with a full disk too
        save_traces(path, traces, about)
    return traces


def scorers_of(model: LanguageModel, tiers: Sequence[TierPlan]) -> list[StateScorer]:
    """The target, and the scorer of each of these tiers. Block sizes and stores are left out."""
    bare = [
        TierPlan(tier.exit_layer, tier.head, tier.skip_layers, tier.draft, tier.vocabulary, tier.weights)
        for tier in tiers
    ]
    scorers = [tier.scorer for tier in model.hierarchy(Plan(tiers=tuple(bare))).tiers]
    assert all(isinstance(scorer, StateScorer) for scorer in scorers)
    return scorers  # type: ignore[return-value]


def _about(
    model: LanguageModel,
    texts: Sequence[tuple[str, list[int]]],
    scorers: Sequence[StateScorer],
    max_tokens: int,
    sampling: Sampling,
) -> Mapping[str, Any]:
    from hierspec import __version__

    return {
        "version": [VERSION, __version__],
        "model": [model.name, str(model.folder), model.dtype, model.weights],
        "pack": {} if model.pack is None else dict(model.pack.hashes),
        "prompts": hashlib.sha256(json.dumps([list(text) for text in texts]).encode()).hexdigest(),
        "tiers": [scorer_key(scorer) for scorer in scorers],
        "sampling": repr(replace(sampling, max_tokens=max_tokens)),
        "depths": [DEPTHS, CANDIDATES],
    }


def _picks(scorer: StateScorer, requests: Sequence[Request]) -> list[Picks]:
    """What one scorer picks along the outputs of these requests."""
    if isinstance(scorer, FeatureScorer):
        return _picks_by_depth(scorer, requests)
    # If all drafts before it are accepted, a tier's pick depends on the text before it alone: one ask about the whole
    # output gives its pick at every position, however much had been written.
    of_all = []
    for request in requests:  # one by one: logits of a whole text are large
        [answer] = scorer.score([_ask(scorer, request, len(request.prompt), len(request.output) - 1)])
        picks = _empty(1, len(request.output), answer)
        for position in range(len(request.output)):
            _put(picks, 0, position, answer, position)
        of_all.append(picks)
    return of_all


def _picks_by_depth(scorer: FeatureScorer, requests: Sequence[Request]) -> list[Picks]:
    """What a drafter on the target's states picks: from every position on, up to `DEPTHS` tokens by its own states.

    From the end to the beginning, and for all texts at once. So the written part of a text only ever gets shorter, and
    the target's states, which are cached for the whole text, are never computed again.
    """
    outputs = [list(request.output) for request in requests]
    of_all: list[Picks | None] = [None] * len(requests)
    try:
        for written in reversed(range(max(map(len, outputs)))):
            longer = [index for index, output in enumerate(outputs) if written < len(output)]
            asks = []
            for index in longer:
                request, output = requests[index], outputs[index]
                request.output = output
                length = min(DEPTHS, len(output) - written) - 1
                asks.append(_ask(scorer, request, len(request.prompt) + written, length))
                request.output = output[:written]  # what counts as written while the drafter is asked
            for index, answer in zip(longer, scorer.score(asks), strict=True):
                picks = of_all[index]
                if picks is None:
                    picks = of_all[index] = _empty(DEPTHS, len(outputs[index]), answer)
                for depth in range(min(DEPTHS, len(outputs[index]) - written)):
                    _put(picks, depth, written + depth, answer, depth)
    finally:
        for request, output in zip(requests, outputs, strict=True):
            request.output = output
    return [picks for picks in of_all if picks is not None]


def _ask(scorer: StateScorer, request: Request, start: int, length: int) -> Ask:
    """Ask what comes after the first `start` tokens of the request's text, and after each of the next `length`."""
    text = np.concatenate((request.prompt, np.array(request.output, np.int32)))
    chain = Proposal.chain(text[start : start + length])
    return Ask(scorer, text[:start], chain, request, CANDIDATES, False, TierStats(scorer.name), leads=True)


def _empty(depths: int, positions: int, answer: Answer) -> Picks:
    assert answer.picks is not None
    candidates = min(CANDIDATES, answer.picks.shape[1])
    tokens = np.full((depths, positions, candidates), NOT_ASKED, np.int32)
    return Picks(tokens, np.zeros((depths, positions), np.float32))


def _put(picks: Picks, depth: int, position: int, answer: Answer, row: int) -> None:
    assert answer.picks is not None
    picks.tokens[depth, position] = answer.picks[row][: picks.tokens.shape[2]]
    if answer.leads is not None:
        picks.leads[depth, position] = answer.leads[row]
