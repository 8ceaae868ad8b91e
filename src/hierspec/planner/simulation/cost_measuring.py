"""Measures the parts of passes: all scorers in turn, after contexts of several lengths, alone and side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
from hierspec.kept import KeptFile
from hierspec.planner.simulation.cost_table import BATCHES, CONTEXTS, WIDTHS, Cell, CostTable, Curve, Parts
from hierspec.planner.simulation.traces import scorer_key
from hierspec.progress import Progress, silent
from hierspec.scorers.base import ModelScorer, StateScorer
from hierspec.scorers.drafters import AdapterScorer, FeatureScorer
from hierspec.scorers.timing import time_head, time_layers

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel

_MOST_ROWS = 64  # of a batched pass: wider ones tell nothing new
_MOST_SLOTS = 8192  # tokens of all contexts together: more would need much memory and tell little
_NARROW = 16  # rows up to which passes are cheap, and which plans mostly run
_ROUNDS, _FEW_ROUNDS = 5, 2  # rounds of narrow passes, and of wider ones and batches
_VERSION = 2  # increase when passes become faster or slower


def cost_table(
    model: LanguageModel, scorers: Iterable[StateScorer], sampled: bool = False, progress: Progress = silent
) -> CostTable:
    """The table of these scorers of a model; what was measured before on this machine comes from the cache."""
    by_key = {scorer_key(scorer): scorer for scorer in scorers}
    files = {key: _file(model, scorer, sampled) for key, scorer in by_key.items()}
    parts: dict[str, Parts] = {}
    for file in files.values():
        table = file.read_json(CostTable.from_json)
        parts |= {} if table is None else table.scorers
    lacking = [scorer for key, scorer in by_key.items() if key not in parts]
    if lacking:
        # All in one call, so that they are measured in turn.
        measured = measure_parts(lacking, sampled, progress=progress)
        for scorer in lacking:
            key = scorer_key(scorer)
            parts[key] = measured.of(scorer)
            files[key].write_json(CostTable({key: parts[key]}, sampled).to_json())
    return CostTable({key: parts[key] for key in by_key}, sampled)


def _file(model: LanguageModel, scorer: StateScorer, sampled: bool) -> KeptFile:
    pack = {} if model.pack is None else dict(model.pack.hashes)
    about = [model.name, str(model.folder), model.dtype, model.weights, pack, scorer_key(scorer), scorer.layers]
    if scorer.decoder is not model.decoder:  # a draft model: another may replace it under the same name
        about.append(repr(scorer.decoder.config))
    return KeptFile.here("costs", about, sampled, _VERSION, name="parts-{key}.json")


def measure_parts(
    scorers: Sequence[StateScorer],
    sampled: bool = False,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    widths: Sequence[int] = WIDTHS,
    progress: Progress = silent,
) -> CostTable:
    """Measures all in turn, round after round, so that a slow moment hits all alike."""
    room = min(scorer.decoder.config.context for scorer in scorers) - max(widths) - 1
    allowed = [context for context in contexts if context <= room] or [max(room, 1)]
    settings = [(c, b) for c in allowed for b in batches if b == 1 or c * b <= _MOST_SLOTS]
    times: dict[tuple[str, str], dict[tuple[int, int, int], list[float]]] = {}
    for number, (context, batch) in enumerate(settings):
        bench = _Bench(scorers, context, batch, max(widths), sampled)
        try:
            for turn in range(_ROUNDS):
                for width in widths:
                    rows = width * batch
                    narrow = rows <= _NARROW and batch == 1
                    wanted = narrow or (turn < _FEW_ROUNDS and rows & (rows - 1) == 0)
                    if rows > _MOST_ROWS or not wanted:
                        continue
                    for place, scorer in enumerate(scorers):
                        # Small tiers run several times in a row: first with the caches full of others' weights.
                        for part, seconds in bench.run(scorer, width, 2 if place else 1, heads=number == 0).items():
                            cells = times.setdefault((scorer_key(scorer), part), {})
                            cells.setdefault((rows, context, batch), []).append(seconds)
        finally:
            bench.close()
        progress("Measuring passes (once)", number + 1, len(settings))

    def curve(scorer: StateScorer, part: str) -> Curve | None:
        cells = times.get((scorer_key(scorer), part))
        if cells is None:
            return None
        return Curve(tuple(_cell(*where, seconds) for where, seconds in sorted(cells.items())))

    parts = {}
    for scorer in scorers:
        head = curve(scorer, "head")
        assert head is not None
        base, own = curve(scorer, "base"), curve(scorer, "own")
        parts[scorer_key(scorer)] = Parts(scorer.name, scorer.layers, base, own, head, curve(scorer, "later"))
    return CostTable(parts, sampled)


def _cell(rows: int, context: int, batch: int, seconds: Sequence[float]) -> Cell:
    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return Cell(rows, context, batch, float(middle), float(high - low) / 2)


class _Bench:
    """Some requests with contexts of one length, of which only the last tokens have to be computed."""

    def __init__(self, scorers: Sequence[StateScorer], context: int, batch: int, most: int, sampled: bool) -> None:
        self._scorers, self._context = scorers, context
        target = scorers[0]
        texts = np.random.default_rng(0).integers(0, target.vocabulary, (batch, context + most)).astype(np.int32)
        sampling = Sampling(temperature=0.8 if sampled else 0.0, seed=0)
        hierarchy = Hierarchy(tuple(Tier(scorer) for scorer in scorers))
        self._requests = [Request(text[:context], sampling, hierarchy) for text in texts]
        for request, text in zip(self._requests, texts, strict=True):
            request.output = text[context:].tolist()  # it counts as written for drafters on the target's states
        self._texts = texts
        for scorer in scorers:
            scorer.forget()
            for _ in range(2):
                self.run(scorer, most if batch == 1 else 1)
        pools = {id(pool): pool for scorer in scorers for pool in scorer.pools}
        for pool in pools.values():
            for staircase in pool.staircases():
                # Memory that was never written to reads far too fast: the system maps all of it to one page of zeros.
                staircase.memory.copy(staircase.slots, staircase.slots)

    def run(self, scorer: StateScorer, width: int, times: int = 1, heads: bool = True) -> dict[str, float]:
        """Seconds of the parts of a pass over `width` tokens of each request, the mean of `times` runs in a row."""
        runs = [self._run(scorer, width, heads) for _ in range(times)]
        return {part: sum(run[part] for run in runs) / times for part in runs[0]}

    def _run(self, scorer: StateScorer, width: int, heads: bool) -> dict[str, float]:
        parts, done = dict[str, float](), self._context
        asks = [
            Ask(scorer, text[: done + width], NOTHING, request, 1, False, TierStats(scorer.name))
            for request, text in zip(self._requests, self._texts, strict=True)
        ]
        own = not isinstance(scorer, ModelScorer)
        if isinstance(scorer, AdapterScorer):
            beneath = ModelScorer(scorer.name, scorer.decoder, scorer.pool, scorer.layers, scorer.head)
            beneath.assume_computed(asks, done)
            parts["base"], _ = time_layers(beneath, asks)
        scorer.assume_computed(asks, done)
        parts["own" if own else "base"], states = time_layers(scorer, asks)
        idle = 0.0
        if isinstance(scorer, FeatureScorer):
            idle, _ = time_layers(scorer, asks)
            beside = Proposal(tuple(self._texts[0][:width].tolist()), (-1,) * width)
            asks = [replace(ask, proposal=beside) for ask in asks]
            later, _ = time_layers(scorer, asks)
            parts["later"] = max(later - idle, 0.0)
            parts["own"] = max(parts["own"] - idle, 0.0)
        if heads:
            rows = states[:1].expand(width, -1).clone()
            chain = Proposal.chain(self._texts[0][1:width])
            ask = Ask(scorer, asks[0].context, chain, self._requests[0], 1, False, asks[0].stats, leads=own)
            parts["head"] = idle + sum(time_head(scorer, [ask], rows))
        return parts

    def close(self) -> None:
        for request in self._requests:
            request.cancel()
        for scorer in self._scorers:
            scorer.forget()
