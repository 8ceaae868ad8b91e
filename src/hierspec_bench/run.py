"""The run: plans and peers interleaved prompt by prompt, each compared with plain decoding before its time counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.equality import Difference, first_difference
from hierspec.language_model import LanguageModel
from hierspec.planner.simulation.replay import Record
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec_bench.journal import Journal
from hierspec_bench.peers import Peer
from hierspec_bench.result import Result, difference_from_json, difference_to_json
from hierspec_bench.runners import Given, PeerRunner, PlanRunner, Runner

PLAIN = "plain"

__all__ = ["PLAIN", "Result", "SideBySide", "records", "run_plans"]

_Key = tuple[int, str]  # which of the samplings, and the contender's name


@dataclass
class SideBySide:
    """Every plan and peer on the same prompts, under one or several samplings. Plain decoding, one prompt at a time,
    is always among them; for every number in `batches` every plan also runs that many prompts side by side.

    Which one goes first rotates, so that a slow minute of the machine hits all alike. Every plan has stores of its
    own, which begin with nothing but what was built on disk, anew in every repeat: what another plan wrote must not
    help it. Every prompt of every repeat has a seed of its own, the same for all contenders.

    `found` has, for each sampling, the outcomes of every contender as far as all contenders have come: it may be read
    at any time, also after a stop.
    """

    model: LanguageModel
    prompts: Sequence[BenchPrompt]
    plans: Mapping[str, Plan]
    samplings: Sequence[Sampling]
    peers: Sequence[Peer] = ()
    batches: Sequence[int] = ()
    repeats: int = 1
    found: list[dict[str, list[Result]]] = field(init=False)
    failed: dict[str, str] = field(init=False, default_factory=dict)  # peers that broke down on the way, and why

    def __post_init__(self) -> None:
        self.plans = {PLAIN: Plan(), **self.plans}
        self.samplings = [replace(one, seed=0 if one.seed is None else one.seed) for one in self.samplings]
        self.found = [{} for _ in self.samplings]
        for place, name in self._contenders():
            self.found[place][name] = []

    @property
    def done(self) -> int:
        """Prompts that all contenders have answered, counted in every repeat."""
        return len(self.found[0][PLAIN])

    @property
    def total(self) -> int:
        return self.repeats * len(self.prompts)

    def run(self, progress: Progress = silent, journal: Journal | None = None) -> list[dict[str, list[Result]]]:
        """Runs what the journal does not hold yet. What stands there is not measured again, only learnt from."""
        kept = _Kept(() if journal is None else journal.entries)
        self._warm_up()
        step = math.lcm(*self.batches)  # so that every size fills its batches
        for repeat in range(self.repeats):
            contenders = self._contenders(watched=journal is not None)
            self._renew_peers(repeat)
            behind: dict[_Key, list[dict[str, Any]]] = {key: [] for key in contenders}  # not yet learnt from
            for start in range(0, len(self.prompts), step):
                group = range(start, min(start + step, len(self.prompts)))
                turn = (repeat * len(self.prompts) + start) // step % len(contenders)
                names = list(contenders)
                outcomes: dict[_Key, list[Result]] = {}
                for key in names[turn:] + names[:turn]:
                    if key[1] in self.failed:
                        continue
                    entry = kept.finished.get((repeat, start, *key))
                    if entry is not None:
                        behind[key].append(entry)
                    else:
                        try:
                            for missed in behind[key]:
                                contenders[key].learn_from(missed, self._given(key, repeat))
                            behind[key] = []
                            entry = contenders[key].run(list(self._given(key, repeat, group)))
                        except HierspecError as error:
                            if not isinstance(contenders[key], PeerRunner):
                                raise
                            self.failed[key[1]] = f"It broke down at prompt {start}: {error}{self._until_then(key)}"
                            continue
                        if journal is not None:
                            journal.write({"finished": [repeat, start, *key], **entry})
                    outcomes[key] = [Result.from_json(one) for one in entry["outcomes"]]
                self._compare((repeat, start), outcomes, kept, journal)
                # In one go: whoever stops the run finds all contenders at the same prompt.
                self.found = [
                    {name: [*old, *outcomes[place, name]] for name, old in known.items() if name not in self.failed}
                    for place, known in enumerate(self.found)
                ]
                progress("Measuring", self.done, self.total)
        return self.found

    def _contenders(self, watched: bool = False) -> dict[_Key, Runner]:
        """Fresh ones, with stores that have learnt nothing."""
        found: dict[_Key, Runner] = {}
        for place, sampling in enumerate(self.samplings):
            for name, plan in self.plans.items():
                found[place, name] = PlanRunner(self.model.apart(), plan, 1, watched)
                for size in self.batches:
                    found[place, f"{name}, batch of {size}"] = PlanRunner(self.model.apart(), plan, size, watched)
            for peer in self.peers:
                if sampling.temperature == 0 or peer.samples:
                    found[place, peer.name] = PeerRunner(self.model, peer)
        return found

    def _given(self, key: _Key, repeat: int, group: Sequence[int] | None = None) -> Iterator[Given]:
        """The prompts of a group with their places and samplings; by default all prompts, by place."""
        sampling = self.samplings[key[0]]
        assert sampling.seed is not None
        for place in range(len(self.prompts)) if group is None else group:
            seed = sampling.seed + repeat * len(self.prompts) + place
            yield Given(place, repeat, self.prompts[place], replace(sampling, seed=seed))

    def _warm_up(self) -> None:
        """The first passes of a process pay for pages and threads."""
        short = replace(self.samplings[0], max_tokens=8)
        for plan in self.plans.values():
            self.model.apart().generate("Hello", plan=plan, sampling=short)
        for peer in self.peers:
            try:
                peer.generate(self.model.encode("Hello"), replace(short, temperature=0.0))
            except HierspecError as error:
                self.failed[peer.name] = f"It broke down when it was warmed up: {error}"

    def _until_then(self, key: _Key) -> str:
        """What is worth telling of a contender that will not come to the end."""
        place, name = key
        if not (done := self.found[place].get(name)):
            return ""
        speed = sum(outcome.count for outcome in done) / sum(outcome.seconds for outcome in done)
        return f" Until then, on {len(done)} prompts, it wrote {speed:.1f} tokens/s."

    def _renew_peers(self, repeat: int) -> None:
        """What a peer has learnt in one repeat must not help it in the next: our stores begin anew, too."""
        for peer in self.peers:
            if repeat == 0 or not peer.learns or peer.name in self.failed:
                continue
            try:
                peer.renew()
            except HierspecError as error:
                self.failed[peer.name] = f"It broke down when it was opened again: {error}"

    def _compare(
        self, where: tuple[int, int], outcomes: Mapping[_Key, list[Result]], kept: _Kept, journal: Journal | None
    ) -> None:
        """Notes in each outcome where it parts from plain decoding's."""
        known = kept.differences.get(where, {})
        fresh: dict[_Key, list[Difference | None]] = {}
        for (place, name), own in outcomes.items():
            if name != PLAIN and (place, name) not in known:
                pairs = zip(outcomes[place, PLAIN], own, strict=True)
                fresh[place, name] = [self._difference(one, two, self.samplings[place]) for one, two in pairs]
        if journal is not None and fresh:
            told = [[*key, [difference_to_json(one) for one in found]] for key, found in fresh.items()]
            journal.write({"compared": list(where), "differences": told})
        for key, differences in {**known, **fresh}.items():
            for outcome, difference in zip(outcomes.get(key, ()), differences, strict=False):
                outcome.difference = difference

    def _difference(self, plain: Result, other: Result, sampling: Sampling) -> Difference | None:
        """The first place where the two part, in the first turn that differs: later turns then answer other texts."""
        assert sampling.seed is not None
        seed = sampling.seed + plain.repeat * len(self.prompts) + plain.prompt
        for asked, one, two in zip(plain.asked, plain.tokens, other.tokens, strict=True):
            if one != two:
                return first_difference(self.model, asked, one, two, sampling, seed)
        return None


class _Kept:
    """What stands in a journal, by where it belongs."""

    def __init__(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self.finished: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.differences: dict[tuple[int, int], dict[_Key, list[Difference | None]]] = {}
        for entry in entries:
            if "finished" in entry:
                self.finished[tuple(entry["finished"])] = dict(entry)
            elif "compared" in entry:
                repeat, start = entry["compared"]
                here = self.differences.setdefault((repeat, start), {})
                for place, name, found in entry["differences"]:
                    here[place, name] = [difference_from_json(one) for one in found]


def run_plans(
    model: LanguageModel,
    prompts: Sequence[BenchPrompt],
    plans: Mapping[str, Plan],
    sampling: Sampling,
    peers: Sequence[Peer] = (),
    progress: Progress = silent,
    batches: Sequence[int] = (),
) -> dict[str, list[Result]]:
    """Outcomes of every plan and peer under one sampling, in the order of the prompts."""
    return SideBySide(model, prompts, plans, [sampling], peers, batches).run(progress)[0]


def records(outcomes: Sequence[Result]) -> list[Record]:
    """What was written, for `planner.replay`."""
    return [
        Record(outcome.task, tuple(asked), tuple(tokens))
        for outcome in outcomes
        for asked, tokens in zip(outcome.asked, outcome.tokens, strict=True)
    ]
