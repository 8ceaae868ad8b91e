"""What a text must look like: a grammar as a request names it. `hierspec.grammars` knows what it allows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown

KINDS = ("json_object", "json_schema", "regex", "lark", "choice")
_MOST_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Grammar:
    """A kind of grammar and its text. It is hashable, so it can be the key of a cache.

    kind         text
    json_object  nothing: any JSON object
    json_schema  the schema, as JSON
    regex        a regular expression that the whole text matches
    lark         a grammar in Lark's notation, whose first rule is `start`
    choice       the allowed texts, as a JSON list
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HierspecError(f"There is no grammar of kind {shown(self.kind)}; kinds are {', '.join(KINDS)}.")
        if not isinstance(self.text, str):
            raise HierspecError(f"The text of a grammar must be a text, not a {type(self.text).__name__}.")
        if len(self.text) > _MOST_CHARACTERS:
            raise HierspecError(f"A grammar may have {_MOST_CHARACTERS:,} characters, and this one has more.")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise HierspecError("The grammar holds half a character (a surrogate); give valid Unicode.") from None
        if self.kind == "json_object":
            if self.text:
                raise HierspecError("A json_object has no text; to say what is in it give a json_schema.")
        elif self.kind == "json_schema":
            if not isinstance(_parsed(self.text, "JSON schema"), dict | bool):
                raise HierspecError("A JSON schema must be an object, such as {'type': 'object'}.")
        elif self.kind == "choice":
            choices = _parsed(self.text, "list of choices")
            if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
                raise HierspecError("A choice must be a list of at least one text.")
            if not all(choices):
                raise HierspecError("A choice may not be empty: leave out the text that has no characters.")
        elif not self.text:
            raise HierspecError(f"The {self.kind} grammar is empty; say what the text must look like.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """From a schema, or its JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else _written(schema, "JSON schema"))

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Grammar:
        """One of these texts."""
        if isinstance(choices, str | bytes) or not isinstance(choices, Iterable):
            raise HierspecError("A choice must be a list of texts, such as ['yes', 'no'].")
        return cls("choice", _written(list(choices), "list of choices"))


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise HierspecError(f"The {what} is nested too deeply; make it flatter.") from None
    except ValueError as error:
        raise HierspecError(f"The {what} is not valid JSON ({shown(str(error))}).") from None


def _written(value: Any, what: str) -> str:
    """As JSON, with keys in the given order: the model writes objects in that order."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise HierspecError(f"The {what} is nested too deeply; make it flatter.") from None
    except (TypeError, ValueError) as error:
        raise HierspecError(f"The {what} holds what JSON has not ({shown(str(error))}).") from None
