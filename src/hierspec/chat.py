"""A conversation whose earlier turns are not computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Unpack

from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling
from hierspec.generating import DEFAULT_PLAN
from hierspec.generation import Generation, TextStep
from hierspec.language_model import LanguageModel
from hierspec.options import ChatOptions, PlanLike, sampling_with, split
from hierspec.prompt_ids import template_variables


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
        **options: Unpack[ChatOptions],
    ) -> None:
        if not model.tokenizer.has_chat_template:
            raise HierspecError(f"{model.name} has no chat template; use generate with a raw prompt.")
        changes, template = split(options)
        if template.get("continue_final_message"):
            raise HierspecError("continue_final_message is for generate; a chat goes on with an answer in go_on.")
        self.model, self.plan, self.sampling = model, plan, sampling_with(sampling, changes)
        self.namespace, self.variables = namespace, template_variables(template)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.last: Generation | None = None
        # The conversation so far, as the template writes it and as token ids: changed together, whenever Ctrl-C comes.
        self._written: tuple[str, list[int]] = "", []
        self._asked: tuple[str, str, list[int]] | None = None  # a turn without its answer: message, text, ids
        self._answered = 0  # ids of the last answer, at the end of what is written

    def say(self, text: str) -> Iterator[TextStep]:
        """The user's turn; the answer comes step by step. An answer left early is kept as far as it got."""
        stream = self.model.stream(self.ask(text), plan=self.plan, sampling=self.sampling, namespace=self.namespace)
        try:
            yield from stream
        finally:
            self.last = stream.generation
            self.answer(self.last.tokens, self.last.text)

    def go_on(self) -> Iterator[TextStep]:
        """More of the last answer, where the limit or the caller ended it. `last` is then only what was added."""
        if self.last is None or self.last.ended == "stop" or self._asked is not None or not self._answered:
            raise HierspecError("There is no unfinished answer to go on with; say something first.")
        if self.sampling.grammar is not None:  # the continuation would restart the grammar
            raise HierspecError("An answer within a grammar cannot go on; ask again with more max_tokens.")
        return self._go_on()

    def _go_on(self) -> Iterator[TextStep]:
        text, ids = self._written
        stream = self.model.stream(ids, plan=self.plan, sampling=self.sampling, namespace=self.namespace)
        try:
            yield from stream
        finally:
            self.last = stream.generation
            tokenizer, tokens = self.model.tokenizer, self.last.tokens
            answered = self._answered + len(tokens)
            written = text + tokenizer.decode(tokens, special=True), [*ids, *tokens]
            content = tokenizer.decode(written[1][-answered:])
            beyond = len(tokenizer.decode(tokens)) - len(self.last.text)
            self.messages[-1]["content"] = content[: len(content) - beyond]  # without what a stop string cut off
            self._written, self._answered = written, answered

    def ask(self, text: str) -> list[int]:
        """The ids of the whole conversation with a new turn of the user's. The turn counts once it is answered.

        Earlier ids stay as the model wrote them. Encoding its words again could split them differently, and the cache
        after that position would be lost.
        """
        if not isinstance(text, str):
            raise HierspecError("What a user says is a text; for messages of other kinds call generate with a list.")
        tokenizer = self.model.tokenizer
        rendered = tokenizer.render_chat([*self.messages, {"role": "user", "content": text}], variables=self.variables)
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
        self._asked, self._answered = None, len(tokens)

    def __repr__(self) -> str:
        return f"Chat({self.model.name!r}, {len(self.messages)} messages)"
