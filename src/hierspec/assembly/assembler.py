"""From a plan to a hierarchy that runs."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any, cast

from hierspec.assembly.drafts import DraftModels, LoadOptions
from hierspec.assembly.host import HostTarget, check_for_host, is_draft_model
from hierspec.assembly.learnt import Learnt
from hierspec.assembly.measured_costs import CostBook
from hierspec.assembly.open_stores import OpenStores
from hierspec.assembly.paces import Learning, PaceBook
from hierspec.assembly.vocabulary import Vocabulary
from hierspec.checkpoints.load import Checkpoint
from hierspec.core.errors import HierspecError
from hierspec.core.foresight import Foresight
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import RoundScorer, Scorer
from hierspec.core.plan import Plan, TierPlan
from hierspec.pacing.round_trees import ACCEPTED_GREEDY, ACCEPTED_SAMPLED, round_tree
from hierspec.scorers.alignment import ALIGNING
from hierspec.scorers.base import ModelScorer, StateScorer
from hierspec.scorers.catalogue import PACKED_SMALL, ScorerCatalogue
from hierspec.scorers.drafters import FeatureScorer
from hierspec.scorers.skipping import skipping_scorer
from hierspec.scorers.synthetic import Synthetics


class Assembler:
    """Builds the hierarchies of one target, and owns what they share: scorer catalogues, stores and paces.

    Without a target's catalogue the target runs in a host (another inference engine): the tiers below it are built
    here and drafted with `Hierarchy.extend(1, …)`, and the host verifies what they write.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: LoadOptions,
        target: ScorerCatalogue | None = None,
        stores: str | Path | None = None,  # the folder of its databases; default: one of the cache
        costs: CostBook | None = None,
        learnt: Learnt | None = None,  # by earlier runs; default: nothing
        history: str | Path | None = None,  # a file or the URL of a database; default: in the folder
        hosted: Checkpoint | None = None,  # checkpoint of a target in a host, for what was trained for it
    ) -> None:
        self.vocabulary, self.options = vocabulary, options
        self.drafts = DraftModels(vocabulary, options)
        self.stores = OpenStores(vocabulary, stores, history)
        self.costs = costs or CostBook(vocabulary.model, options.dtype, options.weights)
        self.synthetics = Synthetics()
        self._target, self._host_target, self._hosted = target, HostTarget(vocabulary.size), hosted
        self._skipping: dict[tuple[int, ...], ModelScorer] = {}  # by the layers left out
        self._foresights: dict[TierPlan, Foresight] = {}
        self._round_scorers: dict[Plan, RoundScorer | None] = {}
        self._learnt = learnt
        self._paces = PaceBook(self.costs, learnt.parts() if learnt is not None else None)

    @property
    def catalogue(self) -> ScorerCatalogue:
        """The scorers on the target's own states."""
        if self._target is None:
            raise HierspecError(f"{self.vocabulary.model} runs in a host: there are no scorers on its states here.")
        return self._target

    @property
    def target(self) -> Scorer:
        """Tier 0: the whole model, or a placeholder if it runs in a host."""
        if self._target is None:
            return self._host_target
        return self._target.whole(self._target.decoder.config.layers)

    def hierarchy(self, plan: Plan) -> Hierarchy:
        """The plan with its names replaced by scorers and stores."""
        if self._target is None:
            check_for_host(plan, self.vocabulary.model, self.costs.times_host, self._hosted is not None)
        else:
            config = self._target.decoder.config
            plan = plan.fitted(config.layers, config.early_exit)
        if plan.tiers or plan.stores:
            ALIGNING.load()  # before a request waits for it
        below = [self.tier_scorer(tier) for tier in plan.tiers]
        scorers = [self.target, *self.synthetics.scorers(plan.tiers, below)]
        # A host's target is no StateScorer; plans that would ask for its costs are refused above.
        timed = cast(list[StateScorer], [scorers[0], *below])
        tiers = [self._tier(plan, level, scorer, timed) for level, scorer in enumerate(scorers)]
        return Hierarchy(tuple(tiers), plan.rule)

    def tiers_below(self, plan: Plan) -> tuple[Tier, ...]:
        """The tiers below the target, the nearest first."""
        return self.hierarchy(plan).tiers[1:]

    def tier_scorer(self, tier: TierPlan) -> StateScorer:
        """The scorer of a tier below the target: one object for all requests, so that their passes are batched."""
        if is_draft_model(tier):
            assert tier.draft is not None
            small = self._target is not None and self._target.is_small(tier.vocabulary)
            return self.drafts.scorer(tier.draft, tier.weights, self.catalogue.tokens if small else None)
        if tier.draft == PACKED_SMALL and self._hosted is not None:
            return self.drafts.small(self._hosted, tier.vocabulary, tier.weights)
        target = self.catalogue
        if tier.exit_layer is not None:
            return target.exit(tier.exit_layer, tier.head, tier.vocabulary, tier.weights)
        if tier.skip_layers:
            return self._skipping_scorer(tuple(sorted(tier.skip_layers)))
        if tier.draft == PACKED_SMALL:
            return target.small_model(tier.vocabulary, tier.weights)
        assert tier.draft is not None, "exit_depth was replaced by exit_layer"
        return target.feature(tier.draft, tier.vocabulary, tier.weights)

    def apart(self) -> Assembler:
        """The same models, with stores as they were built and only the prior that ships with the model."""
        other = copy(self)
        other.stores, other.costs = self.stores.apart(), self.costs.apart()
        other._paces = PaceBook(other.costs, None if self._learnt is None else self._learnt.prior)
        other._learnt, other._foresights, other._round_scorers = None, {}, {}
        return other

    def adopt(self, name: str, part: Learning) -> None:
        """Let a part that was made elsewhere begin with what was learnt under this name, and keep what it learns."""
        self._paces.adopt(name, part)

    def learnt(self) -> dict[str, Any]:
        """What was learnt about drafts so far: counts by the names of scorers and stores."""
        return self._paces.learnt()

    def close(self) -> None:
        """Save what the next run can begin with: unsaved history, what was learnt, corrected costs."""
        self.stores.flush()
        if self._learnt is not None:
            self._learnt.keep(self.learnt())
            self.costs.keep()

    def memory(self) -> dict[str, int]:
        """Bytes of weights, and of KV caches and hidden states of texts."""
        catalogues = self._catalogues()
        return {
            "weights": sum(each.decoder.weight_bytes + each.weight_bytes() for each in catalogues),
            "texts": sum(each.pool.bytes_held() + each.bytes_held() for each in catalogues),
        }

    def forget(self) -> None:
        """Drop everything computed so far. The next answers take longer, but are the same."""
        for catalogue in self._catalogues():
            catalogue.pool.clear()
            catalogue.clear()
        for scorer in self._skipping.values():
            scorer.forget()

    def _catalogues(self) -> list[ScorerCatalogue]:
        return [*([] if self._target is None else [self._target]), *self.drafts.catalogues]

    def _skipping_scorer(self, skipped: tuple[int, ...]) -> ModelScorer:
        if skipped not in self._skipping:
            self._skipping[skipped] = skipping_scorer(self.catalogue.decoder, skipped, self.options.kv_memory)
        return self._skipping[skipped]

    def _tier(self, plan: Plan, level: int, scorer: Scorer, timed: list[StateScorer]) -> Tier:
        """One tier; `timed` are the scorers of all tiers, whose passes may have to be timed."""
        settings = plan.tiers[level - 1] if level else plan
        gather, candidates = (settings.gather, settings.candidates) if isinstance(settings, TierPlan) else (1, 1)
        rounds = None if level else self._rounds(plan, timed)
        return Tier(
            scorer,
            gather,
            self.stores.open(settings.stores),
            settings.budget,
            settings.merge,
            candidates,
            self._paces.pace(plan, level, timed, rounds is not None),
            self._foresights.setdefault(plan.tiers[level - 1], Foresight()) if level else Foresight(),
            rounds,
        )

    def _rounds(self, plan: Plan, scorers: list[StateScorer]) -> RoundScorer | None:
        """The target and the only tier below it in one call, if the plan leaves to the pace what is drafted."""
        if self._target is None or len(plan.tiers) != 1 or not plan.adapt or plan.rule != "coupled":
            return None
        [tier] = plan.tiers
        if tier.until != "worth" or tier.stores or tier.agrees is not None:
            return None
        if plan not in self._round_scorers:  # once, since costs change a little all the time
            self._round_scorers[plan] = self._new_rounds(plan, scorers)
        return self._round_scorers[plan]

    def _new_rounds(self, plan: Plan, scorers: list[StateScorer]) -> RoundScorer | None:
        assert self._target is not None
        [tier], [target, drafter] = plan.tiers, scorers
        if not (isinstance(target, ModelScorer) and isinstance(drafter, FeatureScorer)):
            return None
        above, own = self._paces.costs(plan, 0, scorers), self.costs.costs(drafter)
        greedy, sampled = (
            round_tree(above, own, plan.budget, tier.gather, tier.candidates, rate)
            for rate in (ACCEPTED_GREEDY, ACCEPTED_SAMPLED)
        )
        return self._target.rounds(target, drafter, greedy, sampled)
