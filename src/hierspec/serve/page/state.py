"""The state of the server: its model, its plans as tiers, the load, and the estimated speed of plain decoding."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter
from typing import Any

from hierspec.async_language_model import AsyncLanguageModel
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy
from hierspec.core.plan import NAMED, Plan
from hierspec.language_model import LanguageModel
from hierspec.options import PlanLike
from hierspec.pacing.costs import Costs
from hierspec.serve.page.activity import Activity, TargetPass
from hierspec.worker import Job

_log = logging.getLogger("hierspec.serve")
_PLANS = ("auto", *NAMED)


class State:
    """Inspects a served model. Constant facts are determined once, at the first request for them."""

    def __init__(self, model: AsyncLanguageModel, plan: PlanLike, activity: Activity) -> None:
        self._model, self._worker, self._plan, self._activity = model.model, model.worker, plan, activity
        self._once = asyncio.Lock()
        self._fixed: dict[str, Any] | None = None
        self._costs: Costs | None = None

    async def document(self) -> dict[str, Any]:
        async with self._once:
            if self._fixed is None:
                self._fixed = await asyncio.to_thread(self._find_out)
        jobs = [job for job in self._activity.jobs if job.writer is not None]
        running, waiting = self._worker.running, self._worker.waiting
        return {
            **self._fixed,
            "running": dict(Counter(self._name(job.plan) for job in jobs)),
            "load": {"running": running, "waiting": waiting},
            "tokens_per_second": round(self._activity.tokens_per_second(), 2),
            "plain_tokens_per_second": self._plain(max(1, running), jobs),
            "plain_is": "an estimate: the last passes, scaled by what one with a row a request costs beside them",
            "acceptance": self._activity.acceptance(),
            "history": self._activity.history(),
        }

    def _find_out(self) -> dict[str, Any]:
        """Runs in its own thread, taking turns with the worker: answers may be running."""
        model = self._model
        with model.turn():
            self._costs = model.costs.costs(model.scorer(model.config.layers))
        plans = [_described(model, name, name) for name in _PLANS]
        default = self._name(self._plan)
        if default not in _PLANS:
            plans.insert(0, _described(model, self._plan, default))
        return {"model": _about(model), "default_plan": default, "plans": plans}

    def _name(self, plan: PlanLike) -> str:
        """The plan's name; plans without one are the server's own, since clients can only name plans."""
        if isinstance(plan, str) and plan in _PLANS:
            return plan
        chosen = self._model.plan(plan)
        return next((name for name in _PLANS if self._model.plan(name) == chosen), "default")

    def _plain(self, requests: int, jobs: list[Job]) -> float | None:
        """Tokens per second of all requests together, if each had one row per pass.

        Scales each recent pass by the cost of a pass with one row per request, so that whatever slows the machine down
        also slows the estimate. Without recent passes it uses the measured costs.
        """
        if self._costs is None:
            return None
        each = [self._plain_seconds(made) for made in self._activity.passes()]
        if not each:
            contexts = [len(job.ids) + len(job.writer.tokens) for job in jobs[:requests] if job.writer is not None]
            further = sum(max(0, context - self._costs.context) for context in contexts)
            each = [(self._cost(requests, 1) + further * self._costs.growth[0]) / requests]
        seconds = statistics.fmean(each)
        return round(1 / seconds, 2) if seconds > 0 else None

    def _plain_seconds(self, made: TargetPass) -> float:
        """The time this pass would have taken a request without drafts."""
        return made.seconds * self._cost(made.requests, 1) / self._cost(made.requests, made.rows) + made.between

    def _cost(self, requests: int, rows: int) -> float:
        assert self._costs is not None
        return self._costs.seconds(requests * rows)


def _about(model: LanguageModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "layers": model.config.layers,
        "context": model.config.context,
        "vocabulary": model.config.vocabulary,
        "weights": model.decoder.products,
    }


def _described(model: LanguageModel, plan: PlanLike, name: str) -> dict[str, Any]:
    """A plan as tiers with their stores, the target first; or why it cannot run here."""
    try:
        chosen = model.plan(plan)
        with model.turn():
            hierarchy = model.hierarchy(chosen.fixed())  # fixed: drawing it needs no measurements
    except HierspecError as error:
        _log.info("The plan %s cannot run here: %s", name, error)  # not for clients: it may name files
        return {"name": name, "refused": "This plan needs something that is not here; the log says what.", "tiers": []}
    return {"name": name, "refused": None, "rule": chosen.rule, "tiers": _tiers(model, chosen, hierarchy)}


def _tiers(model: LanguageModel, plan: Plan, hierarchy: Hierarchy) -> list[dict[str, Any]]:
    tiers: list[dict[str, Any]] = []
    for level, tier in enumerate(hierarchy.tiers):
        layers = plan.tiers[level - 1].exit_layer if level else model.config.layers
        tiers.append(
            {
                "name": tier.scorer.name,
                "layers": layers,
                "stores": [store.name for store in tier.stores],
                "block": tier.gather if level else 1,
            }
        )
    return tiers
