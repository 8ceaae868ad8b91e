"""A bench record, the JSON document of `hierspec bench run --output FILE`, read and checked once.

Records of older versions lack keys, and a file may be anybody's: missing values and values of a wrong type are None or
empty here, so that readers need no further checks. docs/bench.md says what each key means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_text, shown_path
from hierspec_bench.estimates import PromptTime, ratio_interval
from hierspec_bench.typed_json import count, items, mapping, mappings, number, read_all_as, read_as, texts

PLAIN, PLAN, PEER = "plain", "plan", "peer"  # kinds of entries
TIME_PARTS = ("drafting", "verifying", "picking", "stores", "other")
_BATCH = ", batch of "  # in the name of a plan that answers several prompts at once


@dataclass(frozen=True)
class Figures:
    """Figures of one plan or engine, over all prompts or over those of one task."""

    prompts: int | None = None
    turns: int | None = None
    identical: int | None = None
    ties: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    tokens_per_second: float | None = None
    median_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    tokens_per_pass: float | None = None
    overhead_ms_per_pass: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    gigabytes_per_second: float | None = None

    @property
    def different(self) -> int:
        """Prompts whose text differs from plain decoding's without a tie that explains it."""
        return (self.prompts or 0) - (self.identical or 0) - (self.ties or 0)


@dataclass(frozen=True)
class Tier:
    """Counters of one tier: its passes, and the drafts that it was given and accepted, by source and by depth."""

    tier: str
    calls: int
    seconds: float
    store_seconds: float
    proposed: Mapping[str, float]
    accepted: Mapping[str, float]
    proposed_by_depth: tuple[float, ...]
    accepted_by_depth: tuple[float, ...]


@dataclass(frozen=True)
class DistributionTest:
    """Whether samples come from plain decoding's distribution; `law` in the document."""

    p: float | None
    statistic: float | None
    tokens: int | None
    method: str
    striking: str


@dataclass(frozen=True)
class FirstDifference:
    task: str
    prompt: int | None
    position: int | None
    tokens: tuple[str, ...]
    gap: float | None
    tie: bool


@dataclass(frozen=True)
class Outlier:
    """A prompt with an outlying time: its tokens per second, and its usual rate."""

    task: str
    prompt: int | None
    tokens_per_second: float | None
    usual: float | None


@dataclass(frozen=True)
class TriedSetting:
    """One setting that was tried for an engine: its speed, or why it was dropped."""

    setting: Any
    tokens_per_second: float | None
    error: str


@dataclass(frozen=True)
class Entry:
    """One plan or engine at one temperature."""

    name: str
    kind: str  # PLAIN, PLAN or PEER
    figures: Figures = Figures()
    tasks: Mapping[str, Figures] = field(default_factory=dict)
    rule: str = ""
    promises_text: bool = True  # False: it promises only the distribution
    synthetic: bool = False
    time: Mapping[str, float] = field(default_factory=dict)  # seconds by activity
    tiers: tuple[Tier, ...] = ()
    distribution: DistributionTest = DistributionTest(None, None, None, "", "")
    first_differences: tuple[FirstDifference, ...] = ()
    differences: tuple[str, ...] = ()  # the same as sentences, in older records
    outliers: tuple[Outlier, ...] | None = None  # None: not computed
    by_prompt: tuple[PromptTime, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)  # of an engine: version, weights, setting
    tried_settings: tuple[TriedSetting, ...] = ()

    @classmethod
    def of(cls, name: str, kind: str, source: Mapping[str, Any]) -> Entry:
        about, time = mapping(source.get("about")), mapping(source.get("time"))
        spent = {part: number(time.get(part)) for part in TIME_PARTS}
        outliers = source.get("outliers")
        return cls(
            name,
            kind,
            read_as(Figures, source),
            {str(task): read_as(Figures, mapping(figures)) for task, figures in mapping(source.get("tasks")).items()},
            rule=str(source.get("rule", "")),
            promises_text=source.get("promises_text") is not False,
            synthetic=bool(source.get("synthetic")),
            time={part: seconds for part, seconds in spent.items() if seconds is not None},
            tiers=read_all_as(Tier, source.get("tiers")),
            distribution=read_as(DistributionTest, mapping(source.get("law"))),
            first_differences=read_all_as(FirstDifference, source.get("first_differences")),
            differences=texts(source.get("differences")),
            outliers=None if outliers is None else read_all_as(Outlier, outliers),
            by_prompt=_prompt_times(source.get("by_prompt")),
            about=about,
            tried_settings=read_all_as(TriedSetting, about.get("searched")),
        )

    @property
    def alone(self) -> bool:
        """Whether it answers one prompt at a time, as for a single user."""
        return _BATCH not in self.name

    def over(self, other: Entry) -> float | None:
        """The ratio of its tokens/s to another's."""
        ours, theirs = self.figures.tokens_per_second, other.figures.tokens_per_second
        return ours / theirs if ours is not None and theirs else None

    def interval_over(self, other: Entry, task: str | None = None) -> tuple[float, float] | None:
        """95% bootstrap interval of that ratio, if the record has times of single prompts."""
        return ratio_interval(self.by_prompt, other.by_prompt, task)

    def in_task(self, task: str) -> Entry:
        return Entry(self.name, self.kind, self.tasks.get(task, Figures()))


def _prompt_times(value: object) -> tuple[PromptTime, ...]:
    """All prompt times, or none: a part would give another ratio."""
    times = []
    for row in mappings(value):
        where = count(row.get("prompt")), count(row.get("repeat", 0))
        tokens, seconds = count(row.get("tokens")), number(row.get("seconds"))
        if where[0] is None or where[1] is None or not tokens or not seconds:
            return ()
        times.append(PromptTime(where[0], where[1], str(row.get("task", "")), tokens, seconds))
    return tuple(times)


@dataclass(frozen=True)
class Setting:
    """Everything that ran at one temperature."""

    temperature: float | None
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, source: Mapping[str, Any]) -> Setting:
        plans, peers = mapping(source.get("plans")), mapping(source.get("peers"))
        ours = [Entry.of(str(name), PLAIN if name == PLAIN else PLAN, mapping(value)) for name, value in plans.items()]
        theirs = [Entry.of(str(name), PEER, mapping(value)) for name, value in peers.items()]
        return cls(number(source.get("temperature")), (*ours, *theirs))

    def named(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]


@dataclass(frozen=True)
class Piece:
    """A run of an answer's text that one source drafted."""

    text: str
    source: str
    tokens: int


@dataclass(frozen=True)
class Answers:
    """The first answer of every plan to one prompt."""

    task: str
    asked: str
    by_plan: Mapping[str, tuple[Piece, ...]]

    @classmethod
    def of(cls, source: Mapping[str, Any]) -> Answers:
        by_plan = {str(plan): _pieces(pieces) for plan, pieces in mapping(source.get("answers")).items()}
        return cls(str(source.get("task") or "prompt"), str(source.get("asked", "")), by_plan)


def _pieces(value: object) -> tuple[Piece, ...]:
    """Pieces of an answer; older records have a piece per token, without a count."""
    pieces = [items(item) for item in items(value)]
    return tuple(
        Piece(str(piece[0]), str(piece[1]), (count(piece[2]) or 1) if len(piece) == 3 else 1)
        for piece in pieces
        if len(piece) in (2, 3)
    )


@dataclass(frozen=True)
class Record:
    document: Mapping[str, Any]  # as it was read, for facts that are only shown or compared
    settings: tuple[Setting, ...]  # one for each temperature; the first is the main one
    answers: tuple[Answers, ...]
    absent: Mapping[str, str]  # engines that did not run, and why

    @classmethod
    def of(cls, document: object) -> Record:
        if not isinstance(document, Mapping) or not isinstance(document.get("plans"), Mapping):
            raise HierspecError('This is not a bench record: it has no "plans" by name.')
        parts = (document, *mappings(document.get("other_temperatures")))
        answers = [Answers.of(text) for text in mappings(document.get("texts"))]
        absent = {str(name): str(reason) for name, reason in mapping(document.get("absent_peers")).items()}
        return cls(document, tuple(map(Setting.of, parts)), tuple(text for text in answers if text.by_plan), absent)

    @classmethod
    def read(cls, path: Path) -> Record:
        def refuse(reason: str) -> HierspecError:
            return HierspecError(
                f"{shown_path(path)} cannot be used ({reason}); give what hierspec bench run --output FILE wrote."
            )

        text = read_text(path, refuse)
        try:
            return cls.of(json.loads(text))
        except HierspecError as error:
            raise refuse(str(error).rstrip(".")) from error
        except (ValueError, RecursionError) as error:
            raise refuse("it is not JSON") from error

    @property
    def main(self) -> Setting:
        return self.settings[0]

    @property
    def plain(self) -> Entry:
        """Plain decoding, the reference for everything else."""
        for entry in self.main.named(PLAIN):
            if entry.figures.speedup and entry.figures.prompts:
                return entry
        raise HierspecError("This bench record has no figures of plain decoding to compare with.")

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for entry in self.main.entries for task in entry.tasks))

    @property
    def best(self) -> Entry | None:
        """Our fastest plan that answers one prompt at a time."""
        return fastest(entry for entry in self.main.named(PLAN) if entry.alone)

    @property
    def best_peer(self) -> Entry | None:
        return fastest(self.main.named(PEER))

    @property
    def complete(self) -> bool:
        return self.document.get("complete") is not False

    @property
    def synthetic(self) -> bool:
        return bool(self.document.get("synthetic")) or any(entry.synthetic for entry in self.main.entries)

    @property
    def prompt_set(self) -> tuple[str, int | None]:
        """The name of the prompt set, and its size; older records have only the name."""
        prompts = self.document.get("prompts")
        if isinstance(prompts, Mapping):
            return str(prompts.get("name", "")), count(prompts.get("count"))
        return str(prompts or ""), None


def fastest(entries: Iterable[Entry]) -> Entry | None:
    timed = [entry for entry in entries if entry.figures.tokens_per_second is not None]
    return max(timed, key=lambda entry: entry.figures.tokens_per_second or 0.0, default=None)
