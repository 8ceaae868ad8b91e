"""Runners answer prompts in a run: one of our plans, alone or in batches, or another engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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


@dataclass(frozen=True)
class PromptToAnswer:
    """A prompt, its index in the run, and a sampling with its own seed."""

    index: int
    repeat: int
    prompt: BenchPrompt
    sampling: Sampling

    def result(self) -> Result:
        return Result(self.prompt.task, self.index, self.repeat)


class Runner(Protocol):
    def run(self, group: Sequence[PromptToAnswer]) -> dict[str, Any]:
        """Answers a group; returns a journal entry: `outcomes`, the results, and what is needed to learn from them
        again."""

    def learn_from(self, entry: Mapping[str, Any], prompts: Iterable[PromptToAnswer]) -> None:
        """Learns what an uninterrupted run learnt when it wrote this entry; `prompts` are all prompts, by index."""


@dataclass
class PlanRunner:
    model: LanguageModel  # with its own stores
    plan: Plan
    size: int  # prompts at once
    recorded: bool  # whether to record the answers of scorers

    def run(self, group: Sequence[PromptToAnswer]) -> dict[str, Any]:
        results: list[Result] = []
        transcripts: list[Any] = []
        for start in range(0, len(group), self.size):
            written, transcript = self._together(group[start : start + self.size])
            results += written
            transcripts.append(transcript)
        return {"outcomes": [result.to_json() for result in results], "transcripts": transcripts}

    def learn_from(self, entry: Mapping[str, Any], prompts: Iterable[PromptToAnswer]) -> None:
        """Replays the answers; if they were too large to keep, answers the prompts again."""
        if not (self.plan.stores or self.plan.tiers):
            return  # nothing learns
        by_index = list(prompts)
        results = [Result.from_json(result) for result in entry["outcomes"]]
        for start, turns in zip(range(0, len(results), self.size), entry["transcripts"], strict=True):
            group = results[start : start + self.size]
            if turns is None:
                self._together([by_index[result.prompt] for result in group])
                continue
            for turn, transcript in enumerate(turns):
                asked = [result for result in group if turn < result.turns]
                self._answers(
                    Playback(transcript),
                    [result.asked[turn] for result in asked],
                    [by_index[result.prompt].sampling for result in asked],
                )

    def _together(self, group: Sequence[PromptToAnswer]) -> tuple[list[Result], list[Any] | None]:
        """Several conversations at once, turn by turn. The time of a turn is divided among the tokens written in it.

        Also returns the scorers' answers, by turn; None if they are not wanted or too large to keep.
        """
        model, plan = self.model, self.plan
        model.forget()  # what another plan computed must not help this one
        results = [item.result() for item in group]
        chats = [Chat(model) for _ in group]
        transcripts: list[Any] | None = [] if self.recorded and not plan.synthetic else None
        for turn in range(max(len(item.prompt.turns) for item in group)):
            running = [number for number, item in enumerate(group) if turn < len(item.prompt.turns)]
            for number in running:
                results[number].asked.append(chats[number].ask(group[number].prompt.turns[turn]))
                if plan.synthetic:  # computes the text that it must agree with, before timing starts
                    model.request(results[number].asked[-1], plan, group[number].sampling).cancel()
            asked = [results[number].asked[-1] for number in running]
            engine = Engine() if transcripts is None else RecordingEngine()
            began = time.perf_counter()
            answers = self._answers(engine, asked, [group[number].sampling for number in running])
            seconds = time.perf_counter() - began
            if isinstance(engine, RecordingEngine):
                transcript = engine.transcript()
                transcripts = None if transcripts is None or transcript is None else [*transcripts, transcript]
            written = sum(len(answer.tokens) for answer in answers)
            for number, answer in zip(running, answers, strict=True):
                chats[number].answer(answer.tokens)
                results[number].add(replace(answer, seconds=seconds * len(answer.tokens) / written))
                results[number].alone = len(group) == 1
        return results, transcripts

    def _answers(self, engine: Engine, asked: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[Generation]:
        """As `LanguageModel.generate_many`, with a given engine and a sampling per prompt."""
        model = self.model
        writers = [
            Writer(model.request(ids, self.plan, sampling), model.tokenizer)
            for ids, sampling in zip(asked, samplings, strict=True)
        ]
        by_request = {id(writer.request): writer for writer in writers}
        for request, step in engine.run([writer.request for writer in writers]):
            by_request[id(request)].add(step)
        return [writer.finish() for writer in writers]


@dataclass
class PeerRunner:
    model: LanguageModel  # provides the tokenizer and chat template of all engines
    peer: Peer

    def run(self, group: Sequence[PromptToAnswer]) -> dict[str, Any]:
        results = []
        for item in group:
            result, chat = item.result(), Chat(self.model)
            self.peer.forget()  # as our plans do
            for turn in item.prompt.turns:
                result.asked.append(chat.ask(turn))
                answer = self.peer.generate(result.asked[-1], item.sampling)
                chat.answer(answer.tokens)
                result.tokens.append(list(answer.tokens))
                result.seconds += answer.seconds
                result.first_tokens += answer.first_tokens
                if answer.first_seconds is None:
                    result.alone = False
                else:
                    result.first_seconds += answer.first_seconds
            results.append(result)
        return {"outcomes": [result.to_json() for result in results]}

    def learn_from(self, entry: Mapping[str, Any], prompts: Iterable[PromptToAnswer]) -> None:
        """An engine that learns from its answers writes them again, untimed."""
        if self.peer.learns:
            by_index = list(prompts)
            self.run([by_index[result["prompt"]] for result in entry["outcomes"]])
