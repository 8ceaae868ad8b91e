"""Who is compared: a plan of ours, alone or in batches, or a peer. Each answers a group of prompts at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from hierspec.chat import Chat
from hierspec.core.engine import Engine
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.generation import Generation, Writer
from hierspec.language_model import LanguageModel
from hierspec.prompts import BenchPrompt
from hierspec_bench.peers import Peer
from hierspec_bench.recording_engine import Playback, RecordingEngine
from hierspec_bench.result import Result


class Given(NamedTuple):
    """A prompt, its place in the run, and how to answer it: with a seed of its own."""

    place: int
    repeat: int
    prompt: BenchPrompt
    sampling: Sampling

    def outcome(self) -> Result:
        return Result(self.prompt.task, self.place, self.repeat)


class Runner(Protocol):
    def run(self, group: Sequence[Given]) -> dict[str, Any]:
        """Answers, as a journal keeps them: `outcomes`, and what is needed to learn from them again."""

    def learn_from(self, entry: Mapping[str, Any], given: Iterable[Given]) -> None:
        """What an unbroken run would have learnt when it wrote this entry; `given` are all prompts, by place."""


@dataclass
class PlanRunner:
    model: LanguageModel  # with stores of its own
    plan: Plan
    size: int  # prompts side by side
    watched: bool  # someone wants to know what scorers answered

    def run(self, group: Sequence[Given]) -> dict[str, Any]:
        outcomes: list[Result] = []
        transcripts: list[Any] = []
        for at in range(0, len(group), self.size):
            found, heard = self._together(group[at : at + self.size])
            outcomes += found
            transcripts.append(heard)
        return {"outcomes": [outcome.to_json() for outcome in outcomes], "transcripts": transcripts}

    def learn_from(self, entry: Mapping[str, Any], given: Iterable[Given]) -> None:
        """Plays the answers back; where they were too large to be kept, the prompts are answered once more."""
        if not (self.plan.stores or self.plan.tiers):
            return  # nothing that could learn
        by_place = list(given)
        outcomes = [Result.from_json(one) for one in entry["outcomes"]]
        for at, turns in zip(range(0, len(outcomes), self.size), entry["transcripts"], strict=True):
            group = outcomes[at : at + self.size]
            if turns is None:
                self._together([by_place[outcome.prompt] for outcome in group])
                continue
            for turn, transcript in enumerate(turns):
                here = [outcome for outcome in group if turn < outcome.turns]
                self._answers(
                    Playback(transcript),
                    [outcome.asked[turn] for outcome in here],
                    [by_place[outcome.prompt].sampling for outcome in here],
                )

    def _together(self, group: Sequence[Given]) -> tuple[list[Result], list[Any] | None]:
        """Several conversations side by side, turn by turn. The time of a turn is shared by the tokens written in it.

        What scorers answered comes with them, by turn, where it is wanted and can be kept.
        """
        model, plan = self.model, self.plan
        model.forget()  # what another plan computed must not help this one
        outcomes = [given.outcome() for given in group]
        chats = [Chat(model) for _ in group]
        heard: list[Any] | None = [] if self.watched and not plan.synthetic else None
        for turn in range(max(len(given.prompt.turns) for given in group)):
            places = [place for place, given in enumerate(group) if turn < len(given.prompt.turns)]
            for place in places:
                outcomes[place].asked.append(chats[place].ask(group[place].prompt.turns[turn]))
                if plan.synthetic:  # what it has to agree with is found out before time counts
                    model.request(outcomes[place].asked[-1], plan, group[place].sampling).cancel()
            asked, samplings = [outcomes[p].asked[-1] for p in places], [group[p].sampling for p in places]
            engine = Engine() if heard is None else RecordingEngine()
            began = time.perf_counter()
            answers = self._answers(engine, asked, samplings)
            seconds = time.perf_counter() - began
            if isinstance(engine, RecordingEngine):
                transcript = engine.transcript()
                heard = None if heard is None or transcript is None else [*heard, transcript]
            written = sum(len(answer.tokens) for answer in answers)
            for place, answer in zip(places, answers, strict=True):
                chats[place].answer(answer.tokens)
                outcomes[place].add(replace(answer, seconds=seconds * len(answer.tokens) / written))
                outcomes[place].alone = len(group) == 1
        return outcomes, heard

    def _answers(self, engine: Engine, asked: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[Generation]:
        """As `LanguageModel.generate_many`, with an engine and samplings of one's own."""
        model = self.model
        writers = [
            Writer(model.request(ids, self.plan, own), model.tokenizer)
            for ids, own in zip(asked, samplings, strict=True)
        ]
        by_request = {id(writer.request): writer for writer in writers}
        for request, step in engine.run([writer.request for writer in writers]):
            by_request[id(request)].add(step)
        return [writer.finish() for writer in writers]


@dataclass
class PeerRunner:
    model: LanguageModel  # whose tokenizer and chat template they all use
    peer: Peer

    def run(self, group: Sequence[Given]) -> dict[str, Any]:
        outcomes = []
        for given in group:
            outcome, chat = given.outcome(), Chat(self.model)
            self.peer.forget()  # as our plans do
            for turn in given.prompt.turns:
                outcome.asked.append(chat.ask(turn))
                answer = self.peer.generate(outcome.asked[-1], given.sampling)
                chat.answer(answer.tokens)
                outcome.tokens.append(list(answer.tokens))
                outcome.seconds += answer.seconds
                outcome.first_tokens += answer.first_tokens
                if answer.first_seconds is None:
                    outcome.alone = False
                else:
                    outcome.first_seconds += answer.first_seconds
            outcomes.append(outcome)
        return {"outcomes": [outcome.to_json() for outcome in outcomes]}

    def learn_from(self, entry: Mapping[str, Any], given: Iterable[Given]) -> None:
        """A peer that learns from its answers writes them once more, untimed."""
        if self.peer.learns:
            by_place = list(given)
            self.run([by_place[outcome["prompt"]] for outcome in entry["outcomes"]])
