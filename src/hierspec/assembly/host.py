"""Which parts of a plan can run if the target belongs to a host, such as another inference engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hierspec.checkpoints.eagle import is_eagle
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Answer, Ask, RequestView
from hierspec.core.plan import Plan, TierPlan
from hierspec.scorers.catalogue import PACKED_FEATURE, PACKED_SMALL

_INSTEAD = 'use a draft model (draft = "MODEL") or stores instead'


@dataclass(frozen=True, eq=False)
class HostTarget:
    """Tier 0 if the target runs in a host, which verifies what the stores and the tiers below propose."""

    vocabulary: int
    name: str = "target"
    kind: str = ""
    pool: None = None  # the host has its states

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        raise HierspecError("The target runs in a host, so the host scores its proposals; begin with tier 1.")

    def release(self, request: RequestView) -> None:
        return


def check_for_host(plan: Plan, model: str, timed: bool = False, weights_here: bool = False) -> None:
    """Refuse plans that need something of the target that is not here.

    The host keeps its layers and hidden states. Its embeddings are missing unless its weights can be read here, and the
    costs of its passes unless somebody times them.
    """
    for level, tier in enumerate(plan.tiers, 1):
        needs, instead = _needs(tier, weights_here)
        if needs:
            raise HierspecError(f"Tier {level} {needs}, which {model} keeps in its host; {instead}.")
    if (plan.adapt or plan.weighs) and not timed:
        key = "adapt" if plan.adapt else 'until = "worth"'
        raise HierspecError(
            f"{key} weighs the costs of the target's passes, which are not measured where {model} runs in a host; "
            "leave it out (in Python: plan.fixed())."
        )


def is_draft_model(tier: TierPlan) -> bool:
    """Whether the tier is a checkpoint of its own, not an exit or a drafter on the target's states or embeddings."""
    return tier.draft is not None and tier.draft not in (PACKED_FEATURE, PACKED_SMALL) and not is_eagle(tier.draft)


def _needs(tier: TierPlan, weights_here: bool) -> tuple[str, str]:
    """What a tier needs of the target, and what to use instead; empty if it needs nothing."""
    if tier.exit_layer is not None or tier.exit_depth is not None:
        return "is an exit of the target and runs on its layers", _INSTEAD
    if tier.skip_layers:
        return "has skip_layers and runs on the target's layers", _INSTEAD
    if tier.draft == PACKED_SMALL and not weights_here:
        return 'has draft = "small", the small model of a pack, and runs on the target\'s embeddings', _INSTEAD
    if tier.draft != PACKED_SMALL and not is_draft_model(tier):
        return f'has draft = "{tier.draft}", a feature drafter, and reads the target\'s hidden states', _INSTEAD
    if tier.agrees is not None:
        return "has agrees and is compared with the target's own text", "leave agrees out"
    if tier.vocabulary == "small" and tier.draft != PACKED_SMALL:
        return 'has vocabulary = "small", the draft vocabulary of the target\'s pack', "leave vocabulary out"
    return "", ""
