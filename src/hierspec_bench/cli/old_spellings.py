"""What `hierspec bench` was called before it had commands: one program with a flag for each thing it does."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hierspec.core.errors import HierspecError

_EXPERIMENTS = Path(__file__).parents[3] / "experiments"
# Flag, its new command, and what replaces the flag there. If two flags were given, the first in this order won.
_COMMANDS = {"--compare": ("compare", ""), "--install-peers": ("peers", "--install"), "--passes": ("passes", "")}
_SCRIPTS = {
    "--store-times": ("store_times", ""),
    "--store-soak": ("store_soak", ""),
    "--synthetic": ("hispec_synthetic", ""),
    "--exits": ("hispec_pairs", "--exits"),
    "--phases": ("phases", ""),
    "--equality-tokens": ("equality", "--tokens"),
}


@dataclass(frozen=True)
class Spelling:
    arguments: list[str]  # of `hierspec bench`, or of the script
    script: str = ""  # in experiments/

    def __str__(self) -> str:
        program = ["python", f"experiments/{self.script}.py"] if self.script else ["hierspec", "bench"]
        return shlex.join([*program, *self.arguments])

    def run_script(self) -> int:
        path = _EXPERIMENTS / f"{self.script}.py"
        if not path.is_file():
            raise HierspecError(f"experiments/{self.script}.py comes with a clone of the repository; run it there.")
        sys.path.insert(0, str(path.parent))
        return int(import_module(self.script).main(self.arguments))


def new_spelling(arguments: list[str]) -> Spelling:
    """The current spelling of the arguments of an old `hierspec bench`."""
    for flag, (name, replacement) in {**_COMMANDS, **_SCRIPTS}.items():
        if any(argument == flag or argument.startswith(f"{flag}=") for argument in arguments):
            rest = _replaced(arguments, flag, replacement)
            return Spelling(rest, script=name) if flag in _SCRIPTS else Spelling([name, *rest])
    return Spelling(["run", *arguments])


def _replaced(arguments: list[str], flag: str, replacement: str) -> list[str]:
    replaced = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != flag:
            replaced.append(argument)
        elif replacement:
            replaced.append(replacement + equals + value)
    return replaced
