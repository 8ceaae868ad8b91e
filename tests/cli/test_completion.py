"""What shells complete: scripts are made from the parsers, and real shells complete with them."""

import os
import pty
import select
import shutil
import subprocess

import pytest
from serving import until

from hierspec.cli.completion import SHELLS, command_words
from hierspec.cli.main import extra_parsers, main, make_parser
from hierspec.core.plan import NAMED


def script(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def bash(source, line):
    words = [word if word else "''" for word in line.split(" ")]
    code = f"source {source}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _hierspec"
    code += '; printf "%s\\n" "${COMPREPLY[@]}"'
    return ran(["bash", "-c", code], source.parent)


def fish(source, line):
    offered = ran(["fish", "--no-config", "-c", f"source {source}; complete -C '{line}'"], source.parent)
    return "\n".join(each.partition("\t")[0] for each in offered.splitlines())  # without their summaries


def ran(command, folder):
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "HOME": str(folder)})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# zsh completes at its prompt alone: this notes what is offered there, and when it is ready for more.
_ZSH = """\
fpath=({folder} $fpath)
autoload -U compinit && compinit -D -u
compadd() {{
    if [[ ${{@[(I)-[OAD]*]}} -eq 0 ]]; then  # what is put into an array is not offered
        local -a matches
        builtin compadd -O matches "$@"
        print -rl -- $matches >> {notes}
    fi
    builtin compadd "$@"
}}
ready() {{ print -r -- '===' >> {notes} }}
zle -N ready && bindkey '^X^X' ready && zle -N zle-line-init ready
"""


def zsh(source, line):
    folder, notes = source.parent, source.parent.parent / "notes"
    notes.touch()
    setup = folder.parent / "setup"
    setup.write_text(_ZSH.format(folder=folder, notes=notes))
    terminal, its_terminal = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=its_terminal, stdout=its_terminal, stderr=its_terminal, cwd=folder,
        env={**os.environ, "TERM": "dumb"}, start_new_session=True,
    )  # fmt: skip
    os.close(its_terminal)

    def wait_for(times):
        def ready():
            if select.select([terminal], [], [], 0)[0]:
                os.read(terminal, 1 << 16)  # else it waits until somebody reads
            return notes.read_text().count("===") >= times

        until(ready)

    try:
        os.write(terminal, f"source {setup}\n".encode())
        wait_for(1)
        os.write(terminal, f"{line}\t\x18\x18".encode())
        wait_for(2)
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
    return notes.read_text().split("===")[1]


@pytest.fixture(params=[bash, zsh, fish], ids=lambda shell: shell.__name__)
def completed(request, capsys, tmp_path):
    """What a shell offers after a line that was typed so far, whose last word is completed."""
    shell = request.param
    if shutil.which(shell.__name__) is None:
        pytest.skip(f"{shell.__name__} is not installed")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "question.txt").touch()
    source = folder / "_hierspec"
    source.write_text(script(shell.__name__, capsys))

    def complete(line):
        (tmp_path / "notes").unlink(missing_ok=True)
        return {*shell(source, line).split()}

    return complete


def test_shells_complete_commands_options_and_plans(completed):
    assert completed("hierspec gen") == {"generate"}
    assert {"generate", "bench", "cache", "completion"} <= completed("hierspec ")
    assert completed("hierspec --vers") == {"--version"}
    assert completed("hierspec generate --pl") == {"--plan"}
    assert {"auto", *NAMED, "question.txt"} <= completed("hierspec generate --plan ")
    assert completed("hierspec generate my-model --plan hd") == {"hd", "hd+"}
    assert completed("hierspec generate -f qu") == {"question.txt"}
    assert completed("hierspec generate qu") == {"question.txt"}  # MODEL may be a file
    assert completed("hierspec generate --max-tokens ") == set()
    assert completed("hierspec train draft --kind f") == {"feature"}
    assert completed("hierspec store build c") == {"corpus"}
    assert completed("hierspec bench ") >= {"run", "passes", "compare", "peers"}
    assert "--baselines" in completed("hierspec bench run --base")
    assert "packed" in completed("hierspec cache prune --kind p")
    assert completed("hierspec completion ") - {"-h", "--help"} == {"bash", "zsh", "fish"}


def test_every_command_and_option_is_in_every_script(capsys):
    commands = list(command_words("", make_parser(), extra_parsers()))
    assert {"generate", "store build corpus", "bench run", "cache prune"} <= {command.path for command in commands}
    for shell in SHELLS:
        text = script(shell, capsys)
        for command in commands:
            assert command.path in text
            for option in command.options:
                for name in option.names:
                    in_fish = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                    assert (in_fish if shell == "fish" else name) in text
