"""Prometheus counters of speculation by tier, source and depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from hierspec.core.stats import Stats, TierStats

MOST_NAMES = 64  # of tiers and of sources: a plan may name anything, so further names are counted together
MOST_DEPTH = 31  # deeper drafts count as this depth
OTHER = "other"

# Name, meaning, labels.
_FAMILIES = (
    ("vllm:spec_decode_num_drafts", "Passes of the target that verified a draft.", ()),
    ("vllm:spec_decode_num_draft_tokens", "Drafted tokens that the target verified.", ()),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that it accepted.", ()),
    ("vllm:spec_decode_num_accepted_tokens_per_pos", "The same by place in the draft.", ("position",)),
    ("hierspec:tier_passes", "Forward passes of a tier, by request.", ("tier",)),
    ("hierspec:tier_written_tokens", "Tokens that a tier wrote, accepted drafts included.", ("tier",)),
    ("hierspec:tier_seconds", "In forward passes of a tier; requests share the time of theirs.", ("tier",)),
    ("hierspec:tier_store_seconds", "In the stores that a tier asked.", ("tier",)),
    ("hierspec:tier_drafted_tokens", "Drafted tokens that a tier verified, by who drafted them.", ("tier", "source")),
    ("hierspec:tier_accepted_tokens", "Drafted tokens that a tier accepted.", ("tier", "source")),
    ("hierspec:tier_drafted_tokens_by_depth", "Drafted tokens that a tier verified.", ("tier", "depth")),
    ("hierspec:tier_accepted_tokens_by_depth", "Drafted tokens that a tier accepted.", ("tier", "depth")),
)
_Values = Counter[tuple[str, ...]]  # by the values of a family's labels


class TierCounters:
    """Sums of the counters of requests, equal to those of `Stats` to the last token."""

    def __init__(self) -> None:
        self.values: dict[str, _Values] = {name: Counter() for name, _, labels in _FAMILIES}
        self._names: set[str] = set()

    def add(self, stats: Stats) -> None:
        for level, tier in enumerate(stats.tiers):
            if level == 0:
                self._add_target(tier)
            self._add_tier(tier, self._bounded(tier.name))

    def copy(self) -> TierCounters:
        other = TierCounters()
        other.values = {name: Counter(values) for name, values in self.values.items()}
        other._names = set(self._names)
        return other

    def families(self, model_name: str) -> Iterator[Metric]:
        for name, document, labels in _FAMILIES:
            family = CounterMetricFamily(name, document, labels=("model_name", *labels))
            values = self.values[name]
            for labelled in sorted(values) or ([()] if not labels else ()):
                family.add_metric([model_name, *labelled], values[labelled])
            yield family

    def _add_target(self, target: TierStats) -> None:
        values = self.values
        values["vllm:spec_decode_num_drafts"][()] += target.drafts
        values["vllm:spec_decode_num_draft_tokens"][()] += target.proposed.total()
        values["vllm:spec_decode_num_accepted_tokens"][()] += target.accepted.total()
        self._add_by("vllm:spec_decode_num_accepted_tokens_per_pos", (), _by_depth(target.accepted_at))

    def _add_tier(self, tier: TierStats, name: str) -> None:
        values = self.values
        values["hierspec:tier_passes"][name,] += tier.calls
        values["hierspec:tier_written_tokens"][name,] += tier.written
        values["hierspec:tier_seconds"][name,] += tier.seconds  # type: ignore[assignment]  # a Counter holds floats too
        values["hierspec:tier_store_seconds"][name,] += tier.store_seconds  # type: ignore[assignment]
        self._add_by("hierspec:tier_drafted_tokens", (name,), self._by_source(tier.proposed))
        self._add_by("hierspec:tier_accepted_tokens", (name,), self._by_source(tier.accepted))
        self._add_by("hierspec:tier_drafted_tokens_by_depth", (name,), _by_depth(tier.proposed_at))
        self._add_by("hierspec:tier_accepted_tokens_by_depth", (name,), _by_depth(tier.accepted_at))

    def _add_by(self, family: str, labels: tuple[str, ...], counts: Iterable[tuple[str, int]]) -> None:
        for label, count in counts:
            self.values[family][*labels, label] += count

    def _by_source(self, counts: Counter[str]) -> Iterator[tuple[str, int]]:
        return ((self._bounded(source), count) for source, count in counts.items())

    def _bounded(self, name: str) -> str:
        if name not in self._names and len(self._names) >= MOST_NAMES:
            return OTHER
        self._names.add(name)
        return name


def _by_depth(counts: Counter[int]) -> Iterator[tuple[str, int]]:
    return ((str(min(depth, MOST_DEPTH)), count) for depth, count in counts.items())
