"""Records traces: the target writes, and every candidate for a tier picks along its text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
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
from hierspec.planner.simulation.acceptance import TARGET
from hierspec.planner.simulation.traces import (
    NOT_ASKED,
    VERSION,
    Picks,
    TokenDistributions,
    Trace,
    load_traces,
    save_traces,
    scorer_key,
)
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec.scorers.drafters import FeatureScorer

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompt_ids import Prompt

DEPTHS = 8  # recorded separately for drafters on their own states; deeper ones are taken to be like the deepest
CANDIDATES = 3  # the pick and its runners-up
_PROGRESS = "Recording what every tier would pick"
LIKELIEST = 256  # tokens of a recorded distribution
_GROUP = 8  # texts at once: as many staircases as a pool keeps of ended requests


def record_traces(
    model: LanguageModel,
    prompts: Sequence[tuple[str, Prompt]],
    tiers: Sequence[TierPlan],
    max_tokens: int = 96,
    sampling: Sampling | None = None,
    progress: Progress = silent,
    distributions: bool = False,
) -> list[Trace]:
    """One trace for each prompt (its task, and its text, messages or ids), with the picks of all these tiers.

    With a temperature every tier picks with the request's keyed noise, as it would while drafting for it. With
    `distributions` those of the tiers and of the target are recorded instead of picks.
    """
    sampling = sampling or Sampling()
    seed = 0 if sampling.seed is None else sampling.seed
    sampling = replace(sampling, max_tokens=max_tokens, seed=seed)
    target, *scorers = scorers_of(model, tiers)
    by_key = {scorer_key(scorer): scorer for scorer in scorers}  # several tiers may mean the same scorer
    hierarchy = Hierarchy((Tier(target), *(Tier(scorer) for scorer in by_key.values())))
    model.forget()  # taps of exits may be new: cached positions lack their states
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
        picks: dict[str, list[Picks]] = {}
        recorded: dict[str, list[TokenDistributions]] = {}
        try:
            for writer, request in zip(writers, requests, strict=True):
                if writer.error is not None:
                    raise writer.error
                request.output = list(writer.output)
            if distributions:
                asked = {TARGET: target, **by_key}
                recorded = {key: _distributions(scorer, requests) for key, scorer in asked.items()}
            else:
                picks = {key: _picks(scorer, requests) for key, scorer in by_key.items()}
        finally:
            for request in requests:
                request.cancel()
        for index, ((task, _), request) in enumerate(zip(group, requests, strict=True)):
            by_tier = {key: of_all[index] for key, of_all in picks.items()}
            along = {key: of_all[index] for key, of_all in recorded.items()}
            prompt, output = tuple(request.prompt.tolist()), tuple(writers[index].output)
            stop_ids = tuple(sorted(request.stop_ids))
            traces.append(
                Trace(task, prompt, output, by_tier, sampling.temperature, seed, request.limit, stop_ids, along)
            )
        progress(_PROGRESS, (start + len(group)) * max_tokens, len(prompts) * max_tokens)
    return traces


def cached_traces(
    model: LanguageModel,
    prompts: Sequence[tuple[str, Prompt]],
    tiers: Sequence[TierPlan],
    max_tokens: int = 96,
    sampling: Sampling | None = None,
    progress: Progress = silent,
    distributions: bool = False,
) -> list[Trace]:
    """The same, from the cache folder if they were recorded before with this model, pack, prompts and sampling."""
    texts = [(task, [int(token) for token in model.encode(prompt)]) for task, prompt in prompts]
    about = _about(model, texts, scorers_of(model, tiers), max_tokens, sampling or Sampling())
    about |= {"distributions": LIKELIEST if distributions else 0, "drafts": [_state_of(tier.draft) for tier in tiers]}
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]
    path = cache_folder() / "traces" / f"{key}.safetensors"
    with suppress(HierspecError):  # absent or damaged: record again
        return load_traces(path, about)
    traces = record_traces(model, texts, tiers, max_tokens, sampling, progress, distributions)
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
) -> dict[str, Any]:
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


def _state_of(draft: str | None) -> list[Any]:
    """Changes when a draft model or a head is trained again in the same place."""
    path = Path(str(draft)).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


# What to do with an answer: the index of its request, the depth and the position that a row is about, and the row.
_Put = Callable[[int, int, int, Answer, int], None]


def _picks(scorer: StateScorer, requests: Sequence[Request]) -> list[Picks]:
    """What one scorer picks along the outputs of these requests."""
    depths = DEPTHS if isinstance(scorer, FeatureScorer) else 1
    of_all: list[Picks | None] = [None] * len(requests)

    def put(index: int, depth: int, position: int, answer: Answer, row: int) -> None:
        picks = of_all[index]
        if picks is None:
            picks = of_all[index] = _empty(depths, len(requests[index].output), answer)
        assert answer.picks is not None
        picks.tokens[depth, position] = answer.picks[row][: picks.tokens.shape[2]]
        if answer.leads is not None:
            picks.leads[depth, position] = answer.leads[row]

    _ask_along(scorer, requests, put)
    return [picks for picks in of_all if picks is not None]


def _distributions(scorer: StateScorer, requests: Sequence[Request]) -> list[TokenDistributions]:
    """What one scorer could write along the outputs of these requests."""
    depths = DEPTHS if isinstance(scorer, FeatureScorer) else 1
    kept = min(LIKELIEST, scorer.vocabulary)
    of_all = []
    for request in requests:
        shape = depths, len(request.output), kept + 1
        of_all.append(TokenDistributions(np.full(shape, NOT_ASKED, np.int32), np.zeros(shape, np.float32)))

    def put(index: int, depth: int, position: int, answer: Answer, row: int) -> None:
        assert answer.distributions is not None
        distribution = answer.distributions[row]
        # Include the token that was written: each tier's probability of it decides what is accepted.
        written = requests[index].output[position]
        likeliest = np.union1d(np.argpartition(distribution, -kept)[-kept:], written)
        likeliest = likeliest[distribution[likeliest] > 0]
        of_all[index].tokens[depth, position, : len(likeliest)] = likeliest
        of_all[index].probabilities[depth, position, : len(likeliest)] = distribution[likeliest]

    _ask_along(scorer, requests, put, distributions=True)
    return of_all


def _ask_along(scorer: StateScorer, requests: Sequence[Request], put: _Put, distributions: bool = False) -> None:
    if isinstance(scorer, FeatureScorer):
        _ask_by_depth(scorer, requests, put, distributions)
        return
    # If all drafts before it are accepted, a tier's pick depends on the text before it alone: one ask about the whole
    # output gives its pick at every position, however much had been written.
    for index, request in enumerate(requests):  # one by one: logits of a whole text are large
        ask = _ask(scorer, request, len(request.prompt), len(request.output) - 1, distributions)
        [answer] = scorer.score([ask])
        for position in range(len(request.output)):
            put(index, 0, position, answer, position)


def _ask_by_depth(scorer: FeatureScorer, requests: Sequence[Request], put: _Put, distributions: bool) -> None:
    """What a drafter on the target's states picks: from every position on, up to `DEPTHS` tokens by its own states.

    From the end to the beginning, and for all texts at once. So the written part of a text only ever gets shorter, and
    the target's states, which are cached for the whole text, are never computed again.
    """
    outputs = [list(request.output) for request in requests]
    try:
        for written in reversed(range(max(map(len, outputs)))):
            longer = [index for index, output in enumerate(outputs) if written < len(output)]
            asks = []
            for index in longer:
                request, output = requests[index], outputs[index]
                request.output = output
                length = min(DEPTHS, len(output) - written) - 1
                asks.append(_ask(scorer, request, len(request.prompt) + written, length, distributions))
                request.output = output[:written]  # what counts as written while the drafter is asked
            answers = scorer.score(asks)
            for index in longer:
                requests[index].output = outputs[index]
            for index, answer in zip(longer, answers, strict=True):
                for depth in range(min(DEPTHS, len(outputs[index]) - written)):
                    put(index, depth, written + depth, answer, depth)
    finally:
        for request, output in zip(requests, outputs, strict=True):
            request.output = output


def _ask(scorer: StateScorer, request: Request, start: int, length: int, distributions: bool = False) -> Ask:
    """Ask what comes after the first `start` tokens of the request's text, and after each of the next `length`."""
    text = np.concatenate((request.prompt, np.array(request.output, np.int32)))
    chain, stats = Proposal.chain(text[start : start + length]), TierStats(scorer.name)
    return Ask(scorer, text[:start], chain, request, CANDIDATES, distributions, stats, leads=not distributions)


def _empty(depths: int, positions: int, answer: Answer) -> Picks:
    assert answer.picks is not None
    candidates = min(CANDIDATES, answer.picks.shape[1])
    tokens = np.full((depths, positions, candidates), NOT_ASKED, np.int32)
    return Picks(tokens, np.zeros((depths, positions), np.float32))
