"""Talk to a model. Earlier turns stay in the KV cache.

An empty line or Ctrl-D leaves, Ctrl-C stops an answer. `--json` reads one message a line from standard input and
prints one JSON document a turn.

examples:
  hierspec chat
  hierspec chat ./my-model --system "You answer in one sentence." --colour
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hierspec.cli import options
from hierspec.cli.console import Colours, note, plain_write

if TYPE_CHECKING:
    from hierspec.chat import Chat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--colour", "--color", action="store_true", help="show which tier drafted each token")
    parser.add_argument("--json", action="store_true", help="one message a line in, one JSON document a turn out")
    options.add_plan(parser)
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    sampling = options.chosen_sampling(arguments)
    model = options.load_model(arguments)
    from hierspec.chat import Chat

    chat = Chat(model, arguments.system, plan=options.chosen_plan(model, arguments), sampling=sampling)
    colours = Colours(sys.stdout, force=True) if arguments.colour else None
    if not arguments.json and sys.stdin.isatty():
        note(f"{model.name}. Ctrl-D leaves, Ctrl-C stops an answer.")
    with model:
        _talk(chat, colours, arguments)
    return 0


def _talk(chat: Chat, colours: Colours | None, arguments: argparse.Namespace) -> None:
    for text in _messages(arguments):
        answer = chat.say(text)
        try:
            for step in answer:
                if arguments.json:
                    continue
                if colours is not None:
                    colours.write(step.pieces)
                else:
                    plain_write(step.pieces, sys.stdout)
        except KeyboardInterrupt:  # what was written of the turn stays
            answer.close()  # type: ignore[attr-defined]
        last = chat.last
        if last is None:
            continue
        if arguments.json:
            document = {"text": last.text, "ended": last.ended, "tokens_per_second": last.tokens_per_second}
            if last.synthetic:
                document["synthetic"] = True
            print(json.dumps(document | {"tokens_per_pass": last.stats.tokens_per_pass}), flush=True)
        else:
            print(flush=True)
            line = f"{last.tokens_per_second:.1f} tokens/s, {last.stats.tokens_per_pass:.2f} tokens per target pass"
            note(line + (" (SYNTHETIC acceptance)" if last.synthetic else ""))


def _messages(arguments: argparse.Namespace) -> Iterator[str]:
    """What the user says, line by line."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() and not arguments.json else "")
        except EOFError:
            return
        if not text.strip():
            return
        yield text
