"""Commands in a chat: lines that begin with a slash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hierspec.cli.auto import plan_in_words
from hierspec.cli.console import note
from hierspec.cli.options import read_plan, usable_name
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file

if TYPE_CHECKING:
    from hierspec.chat import Chat

HELP = """\
/help            this list
/clear           forget the conversation; the system message stays
/system [TEXT]   set the system message and start over, or show it
/plan [NAME]     go on under another plan, a name or a TOML file, or show it
/save FILE       write the conversation to a new file (.json: as JSON, else text)
/quit            leave, as Ctrl-D does
A line that ends with \\ goes on in the next one; so do lines between two lines of \"\"\".
A message that begins with a slash: put a space before it."""


def is_command(message: str) -> bool:
    return message.startswith("/")


class Conversation:
    """A chat that commands change."""

    def __init__(self, chat: Chat, plan: str) -> None:
        self._chat, self._plan = chat, plan
        self._commands = {
            "/help": self._help,
            "/clear": self._clear,
            "/system": self._system,
            "/plan": self._use_plan,
            "/save": self._save,
        }

    def obey(self, line: str) -> bool:
        """Whether the conversation goes on. HierspecError where there is no such command, or it cannot be done."""
        command, _, value = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command not in self._commands:
            raise HierspecError(f"There is no command {command}; /help lists them.")
        self._commands[command](value.strip())
        return True

    def _help(self, value: str) -> None:
        note(HELP)

    def _clear(self, value: str) -> None:
        messages = self._chat.messages
        messages[:] = [message for message in messages if message["role"] == "system"]
        note("The conversation is forgotten.")

    def _system(self, value: str) -> None:
        if value:
            self._chat.messages[:] = [{"role": "system", "content": value}]
            note("The system message is set; the conversation starts over.")
        else:
            messages = [message["content"] for message in self._chat.messages if message["role"] == "system"]
            note(messages[0] if messages else "There is no system message.")

    def _use_plan(self, value: str) -> None:
        model = self._chat.model
        if value:
            read_plan(usable_name("/plan", value))
            plan = model.plan(value)
            model.hierarchy(plan)  # refuses what cannot run
            self._chat.plan, self._plan = plan, value
        for line in plan_in_words(model, self._plan, model.plan(self._chat.plan)):
            note(line)

    def _save(self, value: str) -> None:
        if not value:
            raise HierspecError("/save needs the name of a file.")
        path = Path(usable_name("/save", value)).expanduser()
        if path.exists():
            raise HierspecError(f"{path} exists; name a new file.")
        messages = self._chat.messages
        if path.suffix == ".json":
            text = json.dumps({"model": self._chat.model.name, "messages": messages}, ensure_ascii=False, indent=1)
        else:
            text = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        with whole_file(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        note(f"{len(messages)} messages are saved to {path}.")
