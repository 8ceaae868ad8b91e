"""The run: plans interleaved prompt by prompt, each compared with plain decoding before its time counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hierspec.bench.peers import Peer
from hierspec.bench.prompts import BenchPrompt
from hierspec.chat import Chat
from hierspec.compare import Difference, first_difference
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.core.stats import Stats
from hierspec.language_model import LanguageModel
from hierspec.progress import Progress, silent

PLAIN = "plain"


@dataclass
class Outcome:
    """One prompt under one plan: all turns together."""

    task: str
    tokens: list[list[int]] = field(default_factory=list)  # of each turn
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    difference: Difference | None = None  # from plain decoding, the first one

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


def run_plans(
    model: LanguageModel,
    prompts: Sequence[BenchPrompt],
    plans: Mapping[str, Plan],
    sampling: Sampling,
    peers: Sequence[Peer] = (),
    progress: Progress = silent,
) -> dict[str, list[Outcome]]:
    """Outcomes of every plan and peer, in the order of the prompts. Plain decoding is always among them.

    Which plan goes first rotates from prompt to prompt, so that a slow minute of the machine hits all alike.
    """
    plans = {PLAIN: Plan(), **plans}
    sampling = replace(sampling, seed=0 if sampling.seed is None else sampling.seed)
    names = [*plans, *(peer.name for peer in peers)]
    by_name = {peer.name: peer for peer in peers}
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    for plan in plans.values():  # the first passes of a process pay for pages and threads
        model.generate("Hello", plan=plan, sampling=replace(sampling, max_tokens=8))
    for number, prompt in enumerate(prompts):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            model.forget()  # what one plan computed must not help the next
            if name in plans:
                found[name].append(_run_prompt(model, prompt, plans[name], sampling))
            else:
                found[name].append(_run_peer(model, prompt, by_name[name], sampling))
        for name in names:
            if name != PLAIN:
                found[name][-1].difference = _compare(model, prompt, found[PLAIN][-1], found[name][-1], sampling)
        progress("Measuring", number + 1, len(prompts))
    return found


def _run_prompt(model: LanguageModel, prompt: BenchPrompt, plan: Plan, sampling: Sampling) -> Outcome:
    outcome, chat = Outcome(prompt.task), Chat(model, plan=plan, sampling=sampling)
    for turn in prompt.turns:
        for _ in chat.say(turn):
            pass
        assert chat.last is not None
        answer = chat.last
        outcome.tokens.append(list(answer.tokens))
        outcome.seconds += answer.seconds
        outcome.first_seconds += answer.first_seconds
        outcome.first_tokens += answer.first_tokens
        outcome.stats.add(answer.stats)
    return outcome


def _run_peer(model: LanguageModel, prompt: BenchPrompt, peer: Peer, sampling: Sampling) -> Outcome:
    outcome, messages = Outcome(prompt.task), []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        tokens, seconds = peer.generate(model.encode(messages), sampling)
        messages.append({"role": "assistant", "content": model.tokenizer.decode(tokens)})
        outcome.tokens.append(tokens)
        outcome.seconds += seconds
    return outcome


def _compare(
    model: LanguageModel, prompt: BenchPrompt, plain: Outcome, other: Outcome, sampling: Sampling
) -> Difference | None:
    """The first place where the two part, in the first turn that differs: later turns then answer other texts."""
    messages: list[dict[str, str]] = []
    for turn, one, two in zip(prompt.turns, plain.tokens, other.tokens, strict=True):
        messages.append({"role": "user", "content": turn})
        if one != two:
            assert sampling.seed is not None
            return first_difference(model, model.encode(messages), one, two, sampling, sampling.seed)
        messages.append({"role": "assistant", "content": model.tokenizer.decode(one)})
    return None
