"""The run: plans interleaved prompt by prompt, each compared with plain decoding before its time counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from hierspec.bench.peers import Peer
from hierspec.chat import Chat
from hierspec.compare import Difference, first_difference
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.core.stats import Stats
from hierspec.generation import Generation
from hierspec.language_model import LanguageModel
from hierspec.planner.playing.replay import Record
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt

PLAIN = "plain"


@dataclass
class Outcome:
    """One prompt under one plan: all turns together."""

    task: str
    asked: list[list[int]] = field(default_factory=list)  # ids of the conversation before each answer
    tokens: list[list[int]] = field(default_factory=list)  # of each answer
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    alone: bool = True  # not beside others, so that the time of its first step is its own
    difference: Difference | None = None  # from plain decoding, the first one
    synthetic: bool = False  # some tier only played how often it agrees

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    def add(self, answer: Generation) -> None:
        self.seconds += answer.seconds
        self.first_seconds += answer.first_seconds
        self.first_tokens += answer.first_tokens
        self.stats.add(answer.stats)
        self.synthetic |= answer.synthetic


def run_plans(
    model: LanguageModel,
    prompts: Sequence[BenchPrompt],
    plans: Mapping[str, Plan],
    sampling: Sampling,
    peers: Sequence[Peer] = (),
    progress: Progress = silent,
    batches: Sequence[int] = (),
) -> dict[str, list[Outcome]]:
    """Outcomes of every plan and peer, in the order of the prompts. Plain decoding, one prompt at a time, is always
    among them; for every number in `batches` every plan also runs that many prompts side by side.

    Which one goes first rotates, so that a slow minute of the machine hits all alike. Every plan has stores of its
    own, which begin with nothing but what was built on disk: what another plan wrote must not help it.
    """
    plans = {PLAIN: Plan(), **plans}
    sampling = replace(sampling, seed=0 if sampling.seed is None else sampling.seed)
    runners: dict[str, Callable[[Sequence[BenchPrompt]], list[Outcome]]] = {}
    for name, plan in plans.items():
        runners[name] = partial(_in_batches, 1, model.apart(), plan, sampling)
        for batch in batches:
            runners[f"{name}, batch of {batch}"] = partial(_in_batches, batch, model.apart(), plan, sampling)
    for peer in peers:
        runners[peer.name] = partial(_by_peer, model, peer, sampling)
    found: dict[str, list[Outcome]] = {name: [] for name in runners}
    for plan in plans.values():  # the first passes of a process pay for pages and threads
        model.apart().generate("Hello", plan=plan, sampling=replace(sampling, max_tokens=8))
    names = list(runners)
    step = max(batches, default=1)
    for start in range(0, len(prompts), step):
        group = prompts[start : start + step]
        turn = start // step % len(names)
        for name in names[turn:] + names[:turn]:
            found[name] += runners[name](group)
        for name in names:
            if name != PLAIN:
                for plain, other in zip(found[PLAIN][start:], found[name][start:], strict=True):
                    other.difference = _compare(model, plain, other, sampling)
        progress("Measuring", start + len(group), len(prompts))
    return found


def _in_batches(
    size: int, model: LanguageModel, plan: Plan, sampling: Sampling, group: Sequence[BenchPrompt]
) -> list[Outcome]:
    starts = range(0, len(group), size)
    return [outcome for at in starts for outcome in _together(model, plan, sampling, group[at : at + size])]


def _together(model: LanguageModel, plan: Plan, sampling: Sampling, group: Sequence[BenchPrompt]) -> list[Outcome]:
    """Several conversations side by side, turn by turn. The time of a turn is shared by the tokens written in it."""
    model.forget()  # what another plan computed must not help this one
    outcomes = [Outcome(prompt.task) for prompt in group]
    chats = [Chat(model) for _ in group]
    for turn in range(max(len(prompt.turns) for prompt in group)):
        places = [place for place, prompt in enumerate(group) if turn < len(prompt.turns)]
        for place in places:
            outcomes[place].asked.append(chats[place].ask(group[place].turns[turn]))
            if plan.synthetic:  # what it has to agree with is found out before time counts
                model.request(outcomes[place].asked[-1], plan, sampling).cancel()
        began = time.perf_counter()
        answers = model.generate_many([outcomes[place].asked[-1] for place in places], plan=plan, sampling=sampling)
        seconds = time.perf_counter() - began
        written = sum(len(answer.tokens) for answer in answers)
        for place, answer in zip(places, answers, strict=True):
            chats[place].answer(answer.tokens)
            outcomes[place].tokens.append(list(answer.tokens))
            outcomes[place].add(replace(answer, seconds=seconds * len(answer.tokens) / written))
            outcomes[place].alone = len(group) == 1
    return outcomes


def records(outcomes: Sequence[Outcome]) -> list[Record]:
    """What was written, for `planner.replay`."""
    return [
        Record(outcome.task, tuple(asked), tuple(tokens))
        for outcome in outcomes
        for asked, tokens in zip(outcome.asked, outcome.tokens, strict=True)
    ]


def _by_peer(model: LanguageModel, peer: Peer, sampling: Sampling, group: Sequence[BenchPrompt]) -> list[Outcome]:
    outcomes = []
    for prompt in group:
        outcome, chat = Outcome(prompt.task), Chat(model)
        for turn in prompt.turns:
            outcome.asked.append(chat.ask(turn))
            answer = peer.generate(outcome.asked[-1], sampling)
            chat.answer(answer.tokens)
            outcome.tokens.append(answer.tokens)
            outcome.seconds += answer.seconds
            outcome.first_seconds += answer.first_seconds or 0.0
            outcome.first_tokens += answer.first_tokens
        outcomes.append(outcome)
    return outcomes


def _compare(model: LanguageModel, plain: Outcome, other: Outcome, sampling: Sampling) -> Difference | None:
    """The first place where the two part, in the first turn that differs: later turns then answer other texts."""
    assert sampling.seed is not None
    for asked, one, two in zip(plain.asked, plain.tokens, other.tokens, strict=True):
        if one != two:
            return first_difference(model, asked, one, two, sampling, sampling.seed)
    return None
