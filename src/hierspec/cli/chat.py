"""Talk to a model. Earlier turns stay in the KV cache.

A line is a message; end it with \\ to go on in the next line, or put several lines between two lines of \"\"\". /help
lists the commands. Ctrl-C stops an answer, Ctrl-C twice or Ctrl-D leaves. `--json` reads one message a line from
standard input and prints one JSON document a turn.

examples:
  hierspec chat
  hierspec chat ./my-model --system "You answer in one sentence." --colour
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from hierspec.cli import chat_commands, options
from hierspec.cli.answering import Answering
from hierspec.cli.auto import plan_in_words
from hierspec.cli.chat_input import ChatInput
from hierspec.cli.console import ending, note
from hierspec.cli.parser import text
from hierspec.cli.report import print_document
from hierspec.cli.status import INTERRUPTED
from hierspec.core.errors import HierspecError

if TYPE_CHECKING:
    from hierspec.chat import Chat
    from hierspec.generation import Generation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--system", type=text, metavar="TEXT", help="a system message")
    options.add_colour(parser)
    options.add_json(parser, "one message a line in, one JSON document a turn out")
    parser.add_argument("--verbose", action="store_true", help="show the plan first")
    options.add_plan(parser)
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    sampling = options.chosen_sampling(arguments)
    model = options.load_model(arguments)
    from hierspec.chat import Chat

    plan = options.chosen_plan(model, arguments)
    options.prepare(model, plan)  # one that cannot run is refused before anybody types
    chat = Chat(model, arguments.system, plan=plan, sampling=sampling)
    if arguments.verbose:
        for line in plan_in_words(model, arguments.plan, plan):
            note(line)
    with model:
        return _talk_in_json(chat) if arguments.json else _talk(chat, arguments)


def _talk(chat: Chat, arguments: argparse.Namespace) -> int:
    messages = ChatInput(interactive=sys.stdin.isatty())
    if messages.interactive:
        note(f"{chat.model.name}. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.")
    conversation = chat_commands.Conversation(chat, arguments.plan)
    answering = Answering(sys.stdout, arguments.colour, silent=False, most=chat.sampling.max_tokens)
    stopped = False  # the last thing that happened was a Ctrl-C: another one leaves
    while True:
        try:
            message = messages.next()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if stopped or not messages.interactive:
                print(file=sys.stderr)
                return INTERRUPTED
            stopped = True
            note("\nCtrl-C once more, or Ctrl-D, leaves.")
            continue
        stopped = False
        if not message.strip():
            continue
        try:
            if chat_commands.is_command(message):
                if not conversation.obey(message):
                    return 0
            else:
                stopped = not _answer(chat, answering, message)
        except HierspecError as error:  # one message too long, or a wrong name: the conversation goes on
            if not messages.interactive:
                raise
            note(f"hierspec: {error}")


def _answer(chat: Chat, answering: Answering, message: str) -> bool:
    """Whether it was written to its end and not stopped by Ctrl-C; what was written stays either way."""
    steps, whole = chat.say(message), True
    try:
        answering.show(steps)
    except KeyboardInterrupt:
        whole = False
        steps.close()  # type: ignore[attr-defined]
        print(flush=True)
    if (last := chat.last) is not None:
        if cut := ending(last, chat.sampling.max_tokens):
            note(cut)
        line = f"{last.tokens_per_second:.1f} tokens/s, {last.stats.tokens_per_pass:.2f} tokens per target pass"
        note(("Stopped. " if not whole else "") + line + (" (SYNTHETIC acceptance)" if last.synthetic else ""))
    return whole


def _talk_in_json(chat: Chat) -> int:
    messages = ChatInput(interactive=False, plain=True)
    while True:
        try:
            message = messages.next()
        except EOFError:
            return 0
        if message.strip():
            for _ in chat.say(message):
                pass
            assert chat.last is not None
            print_document(_document(chat.last))


def _document(last: Generation) -> dict[str, object]:
    document = {"text": last.text, "ended": last.ended, "tokens_per_second": last.tokens_per_second}
    return document | ({"synthetic": True} if last.synthetic else {}) | {"tokens_per_pass": last.stats.tokens_per_pass}
