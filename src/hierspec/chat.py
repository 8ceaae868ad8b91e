"""A conversation whose earlier turns are not computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling
from hierspec.generation import Generation, TextStep, sampling_with
from hierspec.language_model import DEFAULT_PLAN, LanguageModel, PlanLike


class Chat:
    """A conversation with one model. Earlier turns stay in the KV cache and are not computed again."""

    def __init__(
        self,
        model: LanguageModel,
        system: str | None = None,
        *,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        namespace: str = "",
        **changes: Any,
    ) -> None:
        if not model.tokenizer.has_chat_template:
            raise HierspecError(f"{model.name} has no chat template; use generate with a raw prompt.")
        self.model, self.plan, self.sampling = model, plan, sampling_with(sampling, changes)
        self.namespace = namespace
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.last: Generation | None = None
        # The conversation so far, as the template writes it and as token ids: changed together, whenever Ctrl-C comes.
        self._written: tuple[str, list[int]] = "", []
        self._asked: tuple[str, str, list[int]] | None = None  # a turn without its answer: message, text, ids

    def say(self, text: str) -> Iterator[TextStep]:
        """The user's turn; the answer comes step by step. An answer left early is kept as far as it got."""
        stream = self.model.stream(self.ask(text), plan=self.plan, sampling=self.sampling, namespace=self.namespace)
        try:
            yield from stream
        finally:
            self.last = stream.generation
            self.answer(self.last.tokens, self.last.text)

    def ask(self, text: str) -> list[int]:
        """The ids of the whole conversation with a new turn of the user's. The turn counts once it is answered.

        Earlier ids stay as the model wrote them. Encoding its words again could split them differently, and the cache
        after that position would be lost.
        """
        tokenizer = self.model.tokenizer
        rendered = tokenizer.render_chat([*self.messages, {"role": "user", "content": text}])
        before, ids_before = self._written
        continues = bool(ids_before) and rendered.startswith(before)
        new = rendered[len(before) :] if continues else rendered
        ids = (ids_before if continues else []) + tokenizer.encode(new, special=True, begin=False)
        self._asked = (text, rendered, ids)
        return list(ids)

    def answer(self, tokens: Sequence[int], text: str | None = None) -> None:
        """The model's turn, however it was written; `text` where a stop string cut it short."""
        assert self._asked is not None, "ask comes before answer"
        tokenizer = self.model.tokenizer
        question, rendered, ids = self._asked
        answer = tokenizer.decode(tokens) if text is None else text
        written = rendered + tokenizer.decode(tokens, special=True), [*ids, *(int(token) for token in tokens)]
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self._written = written
        self._asked = None
