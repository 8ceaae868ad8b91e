"""The options that say what an answer must look like."""

from __future__ import annotations

import argparse

from hierspec.cli.files import InputFile
from hierspec.cli.parser import text
from hierspec.core.grammar import Grammar
from hierspec.core.text_files import read_text, refusal

_REMEDY = "name a text file"


def add_grammar(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("grammar", "what the answer must look like").add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=InputFile, metavar="FILE", help="JSON that the schema in FILE allows")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", type=text, metavar="TEXT", help="a text that the whole expression matches")
    group.add_argument(
        "--grammar", type=InputFile, dest="grammar_file", metavar="FILE", help="a grammar in Lark's notation"
    )
    group.add_argument(
        "--choice", type=text, action="append", metavar="TEXT", help="this text, or another (repeatable)"
    )


def chosen_grammar(arguments: argparse.Namespace) -> Grammar | None:
    if arguments.json_object:
        return Grammar("json_object")
    if arguments.json_schema is not None:
        return Grammar("json_schema", _read(arguments.json_schema))
    if arguments.regex is not None:
        return Grammar("regex", arguments.regex)
    if arguments.grammar_file is not None:
        return Grammar("lark", _read(arguments.grammar_file))
    return None if arguments.choice is None else Grammar.choice(arguments.choice)


def _read(path: InputFile) -> str:
    return read_text(path, refusal(path, _REMEDY))
