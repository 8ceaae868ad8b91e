"""Compiles grammars for a model's vocabulary, each once."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.grammar import Grammar
from hierspec.core.text_files import shown
from hierspec.grammars.constraint import GrammarConstraint
from hierspec.grammars.token_bytes import TokenBytes
from hierspec.text.tokenizer import Tokenizer

_KEPT = 64  # compiled grammars to keep; the least recently used are dropped
# JSON as Python writes it: with free whitespace, small models write spaces without end. Unknown keywords are refused.
_SPELLING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


class GrammarCompiler:
    """What a model's grammars share: its vocabulary as bytes, and compiled grammars. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._matchers: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer, self._vocabulary)

    @cached_property
    def _llguidance(self) -> Any:
        return self._bytes.for_llguidance()

    def prepare(self) -> None:
        """Reads the vocabulary now, which takes up to a second, instead of at the first grammar; for servers."""
        with self._lock:
            _ = self._llguidance

    def constraint(
        self, grammar: Grammar, model_stop_ids: Collection[int], other_stop_ids: Collection[int] = ()
    ) -> GrammarConstraint:
        """The constraint of one new request. Once the grammar is complete, the text may end with one of
        `model_stop_ids`.

        Other stop ids that have characters count as text like any token.
        """
        with self._lock:
            matcher = self._matcher(grammar).deep_copy()
            pieces = self._bytes.pieces
        others = [token for token in other_stop_ids if 0 <= token < len(pieces) and not pieces[token]]
        ends = [token for token in dict.fromkeys((*model_stop_ids, *others)) if 0 <= token < self._vocabulary]
        if not ends:
            raise HierspecError("This model has no stop token to end a grammar's text with; give one as stop_ids.")
        return GrammarConstraint(matcher, self._vocabulary, ends, self._bytes.first_opening, self._bytes.opening_token)

    def _matcher(self, grammar: Grammar) -> Any:
        """A matcher at the beginning of a text, from which requests get copies."""
        matcher = self._matchers.get(grammar)
        if matcher is None:
            matcher = self._matchers[grammar] = self._compiled(grammar)
            if len(self._matchers) > _KEPT:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(grammar)
        return matcher

    def _compiled(self, grammar: Grammar) -> Any:
        tokenizer = self._llguidance  # first: its error says what to install
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(tokenizer, _source(grammar), log_level=0)
        except ValueError as error:
            raise _refused(grammar, str(error)) from None
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return matcher


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's format."""
    from llguidance import LLMatcher

    source: str
    match grammar.kind:
        case "json_object":
            source = LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_SPELLING)
        case "json_schema":
            schema = "{}" if json.loads(grammar.text) is True else grammar.text  # both allow everything
            source = LLMatcher.grammar_from_json_schema(schema, overrides=_SPELLING)
        case "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            source = LLMatcher.grammar_from_lark(grammar.text)
        case _:
            choices = dict.fromkeys(json.loads(grammar.text))
            source = LLMatcher.grammar_from_regex("|".join(re.escape(choice) for choice in choices))
    return source


def _refused(grammar: Grammar, reason: str) -> HierspecError:
    first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return HierspecError(f"The {grammar.kind} grammar cannot be used ({shown(first)}); change it.")
