"""A conversation that keeps what it has already computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.generation import Generation, TextStep
from hierspec.language_model import DEFAULT_PLAN, LanguageModel, sampling_with


class Chat:
    """Turns with one model. What was read and written in earlier turns is not computed again."""

    def __init__(
        self, model: LanguageModel, system: str | None = None, *, plan: Plan | str | Path = DEFAULT_PLAN,
        sampling: Sampling | None = None, namespace: str = "", **changes: Any,
    ) -> None:  # fmt: skip
        if not model.tokenizer.has_chat_template:
            raise HierspecError(f"{model.name} has no chat template; use generate with a raw prompt.")
        self.model, self.plan, self.sampling = model, plan, sampling_with(sampling, changes)
        self.namespace = namespace
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.last: Generation | None = None
        self._text = ""  # the conversation so far, as the template writes it,
        self._ids: list[int] = []  # and the ids that it was read and written as
        self._asked: tuple[str, str, list[int]] | None = None  # a turn without its answer: message, text, ids

    def say(self, text: str) -> Iterator[TextStep]:
        """The user's turn; the answer comes step by step. One that is left early is kept as far as it got."""
        stream = self.model.stream(self.ask(text), plan=self.plan, sampling=self.sampling, namespace=self.namespace)
        try:
            yield from stream
        finally:
            self.last = stream.generation
            self.answer(self.last.tokens, self.last.text)

    def ask(self, text: str) -> list[int]:
        """The ids of the whole conversation with a new turn of the user's. The turn counts once it is answered.

        Where the conversation goes on from what is known, the known ids stay as the model wrote them: encoding its
        words anew could cut them otherwise, and everything computed after that place would be lost.
        """
        tokenizer = self.model.tokenizer
        rendered = tokenizer.render_chat([*self.messages, {"role": "user", "content": text}])
        goes_on = bool(self._ids) and rendered.startswith(self._text)
        new = rendered[len(self._text) :] if goes_on else rendered
        ids = (self._ids if goes_on else []) + tokenizer.encode(new, special=True, begin=False)
        self._asked = (text, rendered, ids)
        return list(ids)

    def answer(self, tokens: Sequence[int], text: str | None = None) -> None:
        """The model's turn, however it was written; `text` where a stop string cut it short."""
        assert self._asked is not None, "ask comes before answer"
        tokenizer = self.model.tokenizer
        question, rendered, ids = self._asked
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": tokenizer.decode(tokens) if text is None else text})
        self._text = rendered + tokenizer.decode(tokens, special=True)
        self._ids = [*ids, *(int(token) for token in tokens)]
        self._asked = None
