"""Reads one JSON value character by character, so that text that cannot become one is detected at once.

A reader is a generator: it is sent one character at a time, returns when the value is complete, and raises `NotJson` at
the first character that cannot continue a JSON value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Reader = Generator[None, str, Result]
CheckKey = Callable[[str], bool]  # whether an outermost object may have this key

_SPACES = " \t\n\r"
_DEEPEST = 64  # levels: Python's own parser runs out of stack at some thousands
_LONGEST_NUMBER = 400  # characters; Python refuses integers of some thousand digits
_WORDS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
_HEXADECIMAL = "0123456789abcdefABCDEF"


class NotJson(Exception):
    """The characters so far do not start a JSON value."""


def any_key(_: str) -> bool:
    return True


def first_character() -> Reader[str]:
    """The next character that is not a space."""
    while (character := (yield)) in _SPACES:
        pass
    return character


def read_container(first: str, key_allowed: CheckKey = any_key) -> Reader[str]:
    """The text of an object or list that begins with `first`.

    `key_allowed` checks the keys of the outermost objects: the object itself, or those in the list.
    """
    text, after = yield from _container(first, key_allowed, 1)
    assert after == ""
    return text


def _value(first: str, key_allowed: CheckKey, level: int) -> Reader[tuple[str, str]]:
    """The text of a value, and the character after it if that was needed to detect the end."""
    if first in "{[":
        return (yield from _container(first, key_allowed, level + 1))
    if first == '"':
        return (yield from _string()), ""
    return (yield from _word(first))


def _container(first: str, key_allowed: CheckKey, level: int) -> Reader[tuple[str, str]]:
    if level > _DEEPEST:
        raise NotJson
    is_object, closing = first == "{", "}" if first == "{" else "]"
    text = first
    character = yield from first_character()
    while character != closing or text != first:  # false only at the end of an empty container
        if is_object:
            if character != '"':
                raise NotJson
            key = yield from _string()
            text += key + ":"
            if not key_allowed(key[1:-1]) or (yield from first_character()) != ":":
                raise NotJson
            character = yield from first_character()
        elif character != "{" and key_allowed is not any_key:
            raise NotJson  # keys are checked, so the items must be objects
        inner = any_key if is_object else key_allowed
        value, after = yield from _value(character, inner, level)
        text += value
        character = after if after and after not in _SPACES else (yield from first_character())
        if character == closing:
            break
        if character != ",":
            raise NotJson
        text += ","
        character = yield from first_character()
    return text + closing, ""


def _string() -> Reader[str]:
    """What follows a quotation mark, up to the next one."""
    characters = ['"']
    while (character := (yield)) != '"':
        if character < " ":
            raise NotJson
        characters.append(character)
        if character == "\\":
            escaped = yield
            characters.append(escaped)
            if escaped == "u":
                for _ in range(4):
                    digit = yield
                    if digit not in _HEXADECIMAL:
                        raise NotJson
                    characters.append(digit)
            elif escaped not in '"\\/bfnrt':
                raise NotJson
    return "".join([*characters, '"'])


def _word(first: str) -> Reader[tuple[str, str]]:
    """A number, true, false or null; a number ends only with the next character."""
    if first not in "-0123456789tfn":
        raise NotJson
    text = first
    while text not in _WORDS:
        character = yield
        if character in ",]}" + _SPACES:
            if not _NUMBER.match(text):
                raise NotJson
            return text, character
        text += character
        in_word = any(word.startswith(text) for word in _WORDS)
        if not in_word and (first in "tfn" or character not in "0123456789.eE+-" or len(text) > _LONGEST_NUMBER):
            raise NotJson
    return text, ""
