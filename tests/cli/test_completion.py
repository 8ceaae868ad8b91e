"""What shells complete: the script is made from the parsers, and a real bash completes with it."""

import shutil
import subprocess

import pytest

from hierspec.cli.completion import SHELLS, command_words
from hierspec.cli.main import extra_parsers, main, make_parser
from hierspec.core.plan import NAMED


def script(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def completed(capsys, tmp_path):
    """What bash offers after a line that was typed so far, whose last word is completed."""
    (tmp_path / "question.txt").touch()
    source = tmp_path / "completion.bash"
    source.write_text(script("bash", capsys))

    def complete(line):
        words = [word if word else "''" for word in line.split(" ")]
        code = f"source {source}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _hierspec"
        code += '; printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    return complete


def test_bash_completes_commands_options_and_plans(completed):
    assert completed("hierspec gen") == ["generate"]
    assert {"generate", "bench", "cache", "completion", "--version"} <= set(completed("hierspec "))
    assert completed("hierspec generate --pl") == ["--plan"]
    assert {"auto", *NAMED} <= set(completed("hierspec generate --plan "))
    assert set(completed("hierspec generate my-model --plan hd")) == {"hd", "hd+"}
    assert completed("hierspec generate -f qu") == ["question.txt"]
    assert completed("hierspec generate qu") == ["question.txt"]  # MODEL may be a file
    assert completed("hierspec generate --max-tokens ") == []
    assert completed("hierspec train draft --kind f") == ["feature"]
    assert completed("hierspec store build c") == ["corpus"]
    assert set(completed("hierspec bench ")) >= {"run", "passes", "compare", "peers"}
    assert "--baselines" in completed("hierspec bench run --base")
    assert "packed" in completed("hierspec cache prune --kind p")
    assert completed("hierspec completion ") == ["bash", "zsh", "fish", "-h", "--help"]


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


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell, capsys, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(script(shell, capsys))
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
