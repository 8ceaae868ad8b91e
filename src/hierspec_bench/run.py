"""The run: plans and other engines interleaved prompt by prompt, checked for equality before timing counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hierspec_bench.runners import PeerRunner, PlanRunner, PromptToAnswer, Runner

PLAIN = "plain"

__all__ = ["PLAIN", "Result", "SideBySide", "records", "run_plans"]

_Key = tuple[int, str]  # index of the sampling, name of the runner
_Group = tuple[int, int]  # repeat, index of the first prompt


@dataclass
class SideBySide:
    """Every plan and engine on the same prompts, under one or several samplings.

    Plain decoding, one prompt at a time, is always among them; for every number in `batches`, every plan also runs that
    many prompts at once.

    The runner that goes first rotates, so that a slow minute of the machine affects all of them. Every plan has its own
    stores, which start with what was built on disk and are reset in every repeat, so that no plan benefits from what
    another wrote. Every prompt of every repeat has its own seed, the same for all runners.

    `results` has, for each sampling, the results of every runner up to the last prompt that all have finished. It may
    be read at any time, also after a stop.
    """

    model: LanguageModel
    prompts: Sequence[BenchPrompt]
    plans: Mapping[str, Plan]
    samplings: Sequence[Sampling]
    peers: Sequence[Peer] = ()
    batches: Sequence[int] = ()
    repeats: int = 1
    results: list[dict[str, list[Result]]] = field(init=False)
    failed: dict[str, str] = field(init=False, default_factory=dict)  # engines that failed during the run, and why

    def __post_init__(self) -> None:
        self.plans = {PLAIN: Plan(), **self.plans}
        self.samplings = [
            replace(sampling, seed=0 if sampling.seed is None else sampling.seed) for sampling in self.samplings
        ]
        self.results = [{} for _ in self.samplings]
        for index, name in self._runners():
            self.results[index][name] = []

    @property
    def done(self) -> int:
        """Prompts that all runners have answered, counted once per repeat."""
        return len(self.results[0][PLAIN])

    @property
    def total(self) -> int:
        return self.repeats * len(self.prompts)

    def run(
        self, progress: Progress = silent, journal: Journal | None = None, over: Callable[[], bool] = lambda: False
    ) -> list[dict[str, list[Result]]]:
        """Runs what the journal does not contain; what it contains is only learnt from, not measured again.

        Starts nothing new once `over` returns True.
        """
        past = _Past(() if journal is None else journal.entries)
        self._warm_up()
        step = math.lcm(*self.batches)  # so that every batch size fills its batches
        for repeat in range(self.repeats):
            runners = self._runners(recorded=journal is not None)
            self._renew_peers(repeat)
            to_learn: dict[_Key, list[dict[str, Any]]] = {key: [] for key in runners}  # entries of the journal
            for start in range(0, len(self.prompts), step):
                if over():
                    return self.results
                group = range(start, min(start + step, len(self.prompts)))
                first = (repeat * len(self.prompts) + start) // step % len(runners)
                keys = list(runners)
                results: dict[_Key, list[Result]] = {}
                for key in keys[first:] + keys[:first]:
                    if key[1] in self.failed:
                        continue
                    entry = past.finished.get((repeat, start, *key))
                    if entry is not None:
                        to_learn[key].append(entry)
                    else:
                        try:
                            for missed in to_learn[key]:
                                runners[key].learn_from(missed, self._to_answer(key, repeat))
                            to_learn[key] = []
                            entry = runners[key].run(list(self._to_answer(key, repeat, group)))
                        except HierspecError as error:
                            if not isinstance(runners[key], PeerRunner):
                                raise
                            self.failed[key[1]] = f"It failed at prompt {start}: {error}{self._until_then(key)}"
                            continue
                        if journal is not None:
                            journal.write({"finished": [repeat, start, *key], **entry})
                    results[key] = [Result.from_json(result) for result in entry["outcomes"]]
                self._compare((repeat, start), results, past, journal)
                # One assignment, so that after a stop all runners are at the same prompt.
                self.results = [
                    {name: [*old, *results[index, name]] for name, old in named.items() if name not in self.failed}
                    for index, named in enumerate(self.results)
                ]
                progress("Measuring", self.done, self.total)
        return self.results

    def _runners(self, recorded: bool = False) -> dict[_Key, Runner]:
        """New runners, whose stores have learnt nothing."""
        runners: dict[_Key, Runner] = {}
        for index, sampling in enumerate(self.samplings):
            for name, plan in self.plans.items():
                runners[index, name] = PlanRunner(self.model.apart(), plan, 1, recorded)
                for size in self.batches:
                    runners[index, f"{name}, batch of {size}"] = PlanRunner(self.model.apart(), plan, size, recorded)
            for peer in self.peers:
                if sampling.temperature == 0 or peer.samples:
                    runners[index, peer.name] = PeerRunner(self.model, peer)
        return runners

    def _to_answer(self, key: _Key, repeat: int, group: Sequence[int] | None = None) -> Iterator[PromptToAnswer]:
        """The prompts of a group, or all of them, with their samplings."""
        sampling = self.samplings[key[0]]
        assert sampling.seed is not None
        for index in range(len(self.prompts)) if group is None else group:
            seed = sampling.seed + repeat * len(self.prompts) + index
            yield PromptToAnswer(index, repeat, self.prompts[index], replace(sampling, seed=seed))

    def _warm_up(self) -> None:
        """Warms up: the first passes of a process pay for page faults and thread starts."""
        short = replace(self.samplings[0], max_tokens=8)
        for plan in self.plans.values():
            self.model.apart().generate("Hello", plan=plan, sampling=short)
        for peer in self.peers:
            try:
                peer.generate(self.model.encode("Hello"), replace(short, temperature=0.0))
            except HierspecError as error:
                self.failed[peer.name] = f"It failed while it was warmed up: {error}"

    def _until_then(self, key: _Key) -> str:
        """The results so far of an engine that failed, in words."""
        index, name = key
        if not (done := self.results[index].get(name)):
            return ""
        speed = sum(result.count for result in done) / sum(result.seconds for result in done)
        return f" Until then, on {len(done)} prompts, it wrote {speed:.1f} tokens/s."

    def _renew_peers(self, repeat: int) -> None:
        """Resets engines that learn, so that one repeat does not help the next: our stores start over, too."""
        for peer in self.peers:
            if repeat == 0 or not peer.learns or peer.name in self.failed:
                continue
            try:
                peer.renew()
            except HierspecError as error:
                self.failed[peer.name] = f"It failed when it was opened again: {error}"

    def _compare(
        self, group: _Group, results: Mapping[_Key, list[Result]], past: _Past, journal: Journal | None
    ) -> None:
        """Records in each result where it first differs from plain decoding's."""
        before = past.differences.get(group, {})
        fresh: dict[_Key, list[Difference | None]] = {}
        for (index, name), others in results.items():
            if name != PLAIN and (index, name) not in before:
                pairs = zip(results[index, PLAIN], others, strict=True)
                fresh[index, name] = [self._difference(plain, other, self.samplings[index]) for plain, other in pairs]
        if journal is not None and fresh:
            rows = [
                [*key, [difference_to_json(difference) for difference in differences]]
                for key, differences in fresh.items()
            ]
            journal.write({"compared": list(group), "differences": rows})
        for key, differences in {**before, **fresh}.items():
            for result, difference in zip(results.get(key, ()), differences, strict=False):
                result.difference = difference

    def _difference(self, plain: Result, other: Result, sampling: Sampling) -> Difference | None:
        """The first difference, in the first turn that differs: later turns answer different texts."""
        assert sampling.seed is not None
        seed = sampling.seed + plain.repeat * len(self.prompts) + plain.prompt
        for asked, expected, written in zip(plain.asked, plain.tokens, other.tokens, strict=True):
            if expected != written:
                return first_difference(self.model, asked, expected, written, sampling, seed)
        return None


class _Past:
    """The content of a journal, by key."""

    def __init__(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self.finished: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.differences: dict[_Group, dict[_Key, list[Difference | None]]] = {}
        for entry in entries:
            if "finished" in entry:
                self.finished[tuple(entry["finished"])] = dict(entry)
            elif "compared" in entry:
                repeat, start = entry["compared"]
                group = self.differences.setdefault((repeat, start), {})
                for index, name, differences in entry["differences"]:
                    group[index, name] = [difference_from_json(difference) for difference in differences]


def run_plans(
    model: LanguageModel,
    prompts: Sequence[BenchPrompt],
    plans: Mapping[str, Plan],
    sampling: Sampling,
    peers: Sequence[Peer] = (),
    progress: Progress = silent,
    batches: Sequence[int] = (),
) -> dict[str, list[Result]]:
    """Results of every plan and engine under one sampling, in the order of the prompts."""
    return SideBySide(model, prompts, plans, [sampling], peers, batches).run(progress)[0]


def records(results: Sequence[Result]) -> list[Record]:
    """What was written, for `hierspec store replay`."""
    return [
        Record(result.task, tuple(asked), tuple(tokens))
        for result in results
        for asked, tokens in zip(result.asked, result.tokens, strict=True)
    ]
