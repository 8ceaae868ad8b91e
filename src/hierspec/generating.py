"""`generate` and its kin: from prompts and options by name to answers, over anything that makes requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Unpack, overload

from hierspec.assembly.auto import AUTO
from hierspec.core.errors import HierspecError
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.generation import Failure, Generation, SomeFailed, Writer
from hierspec.options import (
    ManyCall,
    OneCall,
    Options,
    PlanLike,
    TemplateOptions,
    one_each,
    sampling_with,
    several_samplings,
    split,
)
from hierspec.prompt_ids import Prompt
from hierspec.streams import Stream, StreamMany, write_together
from hierspec.text.tokenizer import Tokenizer
from hierspec.turns import Turns

DEFAULT_PLAN = AUTO


class Generates(ABC):
    """Gives `generate` and its kin to whatever can make requests. Threads may share it."""

    tokenizer: Tokenizer
    turns: Turns

    @abstractmethod
    def encode(self, prompt: Prompt, raw: bool = False, **template: Unpack[TemplateOptions]) -> list[int]:
        """Token ids of a prompt, as `generate` would read it."""

    @abstractmethod
    def request(
        self, prompt: Prompt, plan: PlanLike, sampling: Sampling, raw: bool = False, namespace: str = ""
    ) -> Request:
        """A request for an engine."""

    @overload
    def generate(self, prompt: Prompt, *, n: None = None, **options: Unpack[OneCall]) -> Generation: ...

    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Unpack[OneCall]) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        n: int | None = None,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        raw: bool = False,
        namespace: str = "",
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """The whole answer. Fields of Sampling may be given by name: `generate("…", max_tokens=100)`.

        A text prompt is put into the model's chat template if it has one, unless `raw`. What is written in one
        namespace (a user, a tenant) is never used to draft for another. With `n`, a list of `n` answers: the first is
        what the seed gives without `n`, the others have seeds of their own (`Generation.seed`).
        """
        changes, template = split(options)
        sampling = sampling_with(sampling, changes)
        samplings = [sampling] if n is None else several_samplings(sampling, n)
        ids = self.encode(prompt, raw, **template)
        writers = [self._writer(ids, plan, each, namespace) for each in samplings]
        for _ in write_together(writers, self.turns):
            pass
        return writers[0].finish() if n is None else _all_or_some_failed([writer.result() for writer in writers])

    @overload
    def generate_many(
        self, prompts: Iterable[Prompt], *, errors: Literal["raise"] = "raise", **options: Unpack[ManyCall]
    ) -> list[Generation]: ...

    @overload
    def generate_many(
        self, prompts: Iterable[Prompt], *, errors: Literal["return"], **options: Unpack[ManyCall]
    ) -> list[Generation | Failure]: ...

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        errors: Literal["raise", "return"] = "raise",
        plan: PlanLike | Sequence[PlanLike] = DEFAULT_PLAN,
        sampling: Sampling | Sequence[Sampling] | None = None,
        raw: bool = False,
        namespace: str | Sequence[str] = "",
        **options: Unpack[Options],
    ) -> list[Generation] | list[Generation | Failure]:
        """The same for several prompts in batched passes; each answer is what it would be alone.

        plan, sampling and namespace are one for all or a list with one for each. If some fail, the others are still
        finished: `errors="return"` returns a `Failure` in the place of each failed one, "raise" raises `SomeFailed`,
        whose `results` are that list.
        """
        if errors not in ("raise", "return"):
            raise HierspecError(f'errors must be "raise" or "return", not {errors!r}.')
        begun = self._begin(prompts, plan, sampling, raw, namespace, options)
        for _ in write_together([each for each in begun if isinstance(each, Writer)], self.turns):
            pass
        results = [each.result() if isinstance(each, Writer) else each for each in begun]
        return results if errors == "return" else _all_or_some_failed(results)

    def stream(
        self,
        prompt: Prompt,
        *,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        raw: bool = False,
        namespace: str = "",
        **options: Unpack[Options],
    ) -> Stream:
        """The answer step by step; `.generation` holds the whole of it afterwards."""
        changes, template = split(options)
        sampling = sampling_with(sampling, changes)
        return Stream(self._writer(self.encode(prompt, raw, **template), plan, sampling, namespace), self.turns)

    def stream_many(
        self,
        prompts: Iterable[Prompt],
        *,
        plan: PlanLike | Sequence[PlanLike] = DEFAULT_PLAN,
        sampling: Sampling | Sequence[Sampling] | None = None,
        raw: bool = False,
        namespace: str | Sequence[str] = "",
        **options: Unpack[Options],
    ) -> StreamMany:
        """(index of the prompt, step) as passes finish; `.results` holds all answers afterwards."""
        return StreamMany(self._begin(prompts, plan, sampling, raw, namespace, options), self.turns)

    def _writer(self, ids: list[int], plan: PlanLike, sampling: Sampling, namespace: str) -> Writer:
        return Writer(self.request(ids, plan, sampling, namespace=namespace), self.tokenizer)

    def _begin(
        self,
        prompts: Iterable[Prompt],
        plan: PlanLike | Sequence[PlanLike],
        sampling: Sampling | Sequence[Sampling] | None,
        raw: bool,
        namespace: str | Sequence[str],
        options: Options,
    ) -> list[Writer | Failure]:
        """A request for every prompt; a prompt that is refused fails alone, options that are wrong fail the call."""
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise HierspecError("Several prompts are given as a list; for a single one call generate or stream.")
        prompts, (changes, template) = list(prompts), split(options)
        plans: list[PlanLike] = one_each(plan, len(prompts), "plan")
        namespaces: list[str] = one_each(namespace, len(prompts), "namespace")
        samplings = [sampling_with(each, changes) for each in one_each(sampling, len(prompts), "sampling")]
        begun: list[Writer | Failure] = []
        for prompt, its_plan, its_sampling, its_namespace in zip(prompts, plans, samplings, namespaces, strict=True):
            try:
                ids = self.encode(prompt, raw, **template)
                begun.append(self._writer(ids, its_plan, its_sampling, its_namespace))
            except HierspecError as error:
                begun.append(Failure(error))
        return begun


def _all_or_some_failed(results: Sequence[Generation | Failure]) -> list[Generation]:
    """All answers. If some failed, raises an error that holds the others."""
    answers = [result for result in results if isinstance(result, Generation)]
    if len(answers) < len(results):
        raise SomeFailed(results)
    return answers
