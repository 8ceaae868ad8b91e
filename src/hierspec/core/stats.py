"""Counters. Planner, bench, metrics and the command line all read these same numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hierspec.core.proposal import Proposal


@dataclass
class TierStats:
    """What one tier did: passes it ran, drafts it verified and how many of them it accepted."""

    name: str
    calls: int = 0
    drafts: int = 0  # of the calls, those that verified a draft
    proposed: Counter[str] = field(default_factory=Counter)  # by who drafted
    accepted: Counter[str] = field(default_factory=Counter)
    proposed_at: Counter[int] = field(default_factory=Counter)  # by depth, 0 right after the context
    accepted_at: Counter[int] = field(default_factory=Counter)
    written: int = 0
    seconds: float = 0.0  # in the tier's passes
    pick_seconds: float = 0.0  # of these, picking tokens from the logits, where the scorer measures it
    store_seconds: float = 0.0  # in the stores it asked
    known: int | None = None  # positions found in the KV cache from earlier texts; None: not looked up yet
    reach: int = 0  # positions that its last pass covered, draft nodes included
    expected_seconds: float = 0.0  # expected time of its passes by measured costs, where its pace has them
    prefill_seconds: float = 0.0  # of its passes that also prefilled
    prefill_written: int = 0  # tokens that these passes wrote

    def count(self, proposal: Proposal, accepted: list[int], written: int) -> None:
        self.calls += 1
        self.drafts += bool(proposal.sources)
        self.written += written
        for source, depth in zip(proposal.sources, proposal.depths(), strict=True):
            self.proposed[source] += 1
            self.proposed_at[depth] += 1
        for depth, node in enumerate(accepted):
            self.accepted[proposal.sources[node]] += 1
            self.accepted_at[depth] += 1

    def add(self, other: TierStats) -> None:
        self.calls += other.calls
        self.drafts += other.drafts
        self.written += other.written
        self.seconds += other.seconds
        self.pick_seconds += other.pick_seconds
        self.store_seconds += other.store_seconds
        self.expected_seconds += other.expected_seconds
        self.proposed.update(other.proposed)
        self.accepted.update(other.accepted)
        self.proposed_at.update(other.proposed_at)
        self.accepted_at.update(other.accepted_at)

    def to_json(self) -> dict[str, object]:
        depths = range(max(self.proposed_at, default=-1) + 1)
        return {
            "tier": self.name,
            "calls": self.calls,
            "written": self.written,
            "proposed": dict(self.proposed),
            "accepted": dict(self.accepted),
            "proposed_by_depth": [self.proposed_at[depth] for depth in depths],
            "accepted_by_depth": [self.accepted_at[depth] for depth in depths],
            "seconds": round(self.seconds, 6),
            "store_seconds": round(self.store_seconds, 6),
        }


@dataclass
class Stats:
    """The counters of all tiers of a request, or of several requests under one plan. Tier 0 is the target."""

    tiers: list[TierStats] = field(default_factory=list)

    def add(self, other: Stats) -> None:
        for level, tier in enumerate(other.tiers):
            if level == len(self.tiers):
                self.tiers.append(TierStats(tier.name))
            self.tiers[level].add(tier)

    @property
    def passes(self) -> int:
        """Passes of the target."""
        return self.tiers[0].calls if self.tiers else 0

    @property
    def tokens_per_pass(self) -> float:
        return self.tiers[0].written / self.passes if self.passes else 0.0

    def to_json(self) -> list[dict[str, object]]:
        return [tier.to_json() for tier in self.tiers]
