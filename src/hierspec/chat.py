"""A conversation that keeps what it has already computed."""

from __future__ import annotations

from collections.abc import Iterator
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
        sampling: Sampling | None = None, **changes: Any,
    ) -> None:  # fmt: skip
        if not model.tokenizer.has_chat_template:
            raise HierspecError(f"{model.name} has no chat template; use generate with a raw prompt.")
        self.model, self.plan, self.sampling = model, plan, sampling_with(sampling, changes)
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.last: Generation | None = None
        self._known: tuple[str, list[int]] = ("", [])  # the conversation so far as text, and the ids that it was

    def say(self, text: str) -> Iterator[TextStep]:
        """The user's turn; the answer comes step by step. One that is left early is kept as far as it got."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids, rendered = self._encode(messages)
        stream = self.model.stream(ids, plan=self.plan, sampling=self.sampling)
        try:
            yield from stream
        finally:
            answer = stream.generation
            self.last = answer
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            written = self.model.tokenizer.decode(answer.tokens, special=True)
            self._known = (rendered + written, [*ids, *answer.tokens])

    def _encode(self, messages: list[dict[str, str]]) -> tuple[list[int], str]:
        """Ids of the conversation. Where it goes on from what is known, the known ids stay as the model wrote them:
        encoding its words anew could cut them otherwise and lose all that was computed after."""
        tokenizer = self.model.tokenizer
        rendered = tokenizer.render_chat(messages)
        known, ids = self._known
        if known and rendered.startswith(known):
            return [*ids, *tokenizer.encode(rendered[len(known) :], special=True, begin=False)], rendered
        return tokenizer.encode(rendered, special=True, begin=False), rendered
