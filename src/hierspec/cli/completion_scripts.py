"""Completion scripts for bash, zsh and fish, from a list of what can follow each command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Option:
    """An option, and what its value may be."""

    names: tuple[str, ...]
    summary: str
    takes_value: bool
    words: tuple[str, ...] = ()
    files: bool = False


@dataclass
class Command:
    """What can follow a command; its path is empty for `hierspec` itself."""

    path: str
    commands: dict[str, str] = field(default_factory=dict)  # with a summary each
    options: list[Option] = field(default_factory=list)
    words: tuple[str, ...] = ()  # what its argument may be,
    files: bool = False  # and whether that may be a file


# What bash and zsh have in common: which command was typed, and what may follow it.
_CASES = """\
    for ((index = {first}; index < {last}; index++)); do
        word=${{{typed}[index]}}
        case "$command $word" in
{walk}
            *) [[ $word == -* ]] && break ;;
        esac
    done
    local offered="" files=""
    case "$command:$previous" in
{values}
        *)
            case "$command" in
{follow}
            esac ;;
    esac"""

_BASH = """\
# bash completion for hierspec; made by: hierspec completion bash
_hierspec() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command="" word index
    # = splits words in bash; the option before it is the one to complete.
    [[ $current == "=" ]] && current=""
    [[ $previous == "=" ]] && previous=${{COMP_WORDS[COMP_CWORD-2]}}
{cases}
    COMPREPLY=($(compgen -W "$offered" -- "$current"))
    [[ -n $files && $current != -* ]] && COMPREPLY+=($(compgen -f -- "$current"))
    return 0
}}
complete -o filenames -F _hierspec hierspec
"""

_ZSH = """\
#compdef hierspec
# zsh completion for hierspec; made by: hierspec completion zsh
_hierspec() {{
    local current=${{words[CURRENT]}} previous=${{words[CURRENT-1]}} command="" word index
{cases}
    compadd -- ${{=offered}}
    [[ -n $files && $current != -* ]] && _files
    return 0
}}
if [[ $funcstack[1] == _hierspec ]]; then _hierspec "$@"; else compdef _hierspec hierspec; fi
"""

_FISH = """\
# fish completion for hierspec; made by: hierspec completion fish
function __hierspec_command
    set -l command
    for word in (commandline -opc)[2..-1]
        switch "$command $word"
{walk}
            case '* -*'
                break
        end
    end
    test "$command" = "$argv[1]"
end
complete -c hierspec -f
"""


def bash(commands: Sequence[Command]) -> str:
    return _BASH.format(cases=_cases(commands, first="1", last="COMP_CWORD", typed="COMP_WORDS"))


def zsh(commands: Sequence[Command]) -> str:
    return _ZSH.format(cases=_cases(commands, first="2", last="CURRENT", typed="words"))


def fish(commands: Sequence[Command]) -> str:
    walk = "\n".join(
        f"            case {shlex.quote(f'{command.path} {name}')}\n"
        f"                set command {shlex.quote(f'{command.path} {name}'.strip())}"
        for command in commands
        for name in command.commands
    )
    lines = [_FISH.format(walk=walk).rstrip("\n")]
    for command in commands:
        here = f"complete -c hierspec -n {shlex.quote(f'__hierspec_command {shlex.quote(command.path)}')}"
        for name, summary in command.commands.items():
            lines.append(f"{here} -a {_fish_quote(name)} -d {_fish_quote(summary)}")
        if command.words:
            lines.append(f"{here} -a {_fish_quote(' '.join(command.words))}")
        if command.files:
            lines.append(f"{here} -F")
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = ("-r -F" if option.files else "-x") if option.takes_value else ""
            words = f"-a {_fish_quote(' '.join(option.words))}" if option.words else ""
            parts = (here, names, value, words, f"-d {_fish_quote(option.summary)}")
            lines.append(" ".join(part for part in parts if part))
    return "\n".join(lines) + "\n"


def _cases(commands: Sequence[Command], **names: str) -> str:
    walk, values, follow = [], [], []
    for command in commands:
        for name in command.commands:
            path = f"{command.path} {name}"
            walk.append(f"            {_quote(path)}) command={_quote(path.strip())} ;;")
        for option in command.options:
            if option.takes_value:
                pattern = "|".join(_quote(f"{command.path}:{name}") for name in option.names)
                values.append(f"        {pattern}) {_offer(option.words, option.files)} ;;")
        options = [name for option in command.options for name in option.names]
        offered = (*command.commands, *command.words, *options)
        follow.append(f"                {_quote(command.path)}) {_offer(offered, command.files)} ;;")
    return _CASES.format(walk="\n".join(walk), values="\n".join(values), follow="\n".join(follow), **names)


def _offer(words: Sequence[str], files: bool) -> str:
    return f"offered={_quote(' '.join(words))}" + ("; files=1" if files else "")


def _quote(text: str) -> str:
    return shlex.quote(text) if text else "''"


def _fish_quote(text: str) -> str:
    """In fish, single quotes and backslashes are escaped within single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
