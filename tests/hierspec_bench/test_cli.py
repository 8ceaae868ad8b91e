"""`hierspec bench`: found by an entry point, its commands, and the spellings of before."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hierspec.cli import main as hierspec_main
from hierspec.cli.main import main
from hierspec_bench.cli import old_spellings
from hierspec_bench.cli.main import COMMANDS
from hierspec_bench.cli.old_spellings import new_spelling

ROOT = Path(__file__).parents[2]
RECORD = str(ROOT / "docs" / "results" / "auto-greedy.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", command, "--help"])
    assert stopped.value.code == 0
    assert f"hierspec bench {command} " in capsys.readouterr().out.split("example")[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--plans auto,lookup", "hierspec bench run --plans auto,lookup"),
        ("./model --batch 3 --peers all", "hierspec bench run ./model --batch 3 --peers all"),
        ("--compare a.json b.json --tolerance 0.1", "hierspec bench compare a.json b.json --tolerance 0.1"),
        ("--json --compare a b", "hierspec bench compare --json a b"),
        ("--install-peers", "hierspec bench peers --install"),
        ("--install-peers all,llama.cpp-native", "hierspec bench peers --install all,llama.cpp-native"),
        ("--install-peers=vllm", "hierspec bench peers --install=vllm"),
        ("--passes --peers transformers", "hierspec bench passes --peers transformers"),
        ("--store-times --largest 1000", "python experiments/store_times.py --largest 1000"),
        ("--store-soak --output soak.json", "python experiments/store_soak.py --output soak.json"),
        ("--synthetic --rates token --limit 8", "python experiments/hispec_synthetic.py --rates token --limit 8"),
        ("default-ee --exits 2,4 --limit 12", "python experiments/hispec_pairs.py default-ee --exits 2,4 --limit 12"),
        ("--phases --plans plain,hd+", "python experiments/phases.py --plans plain,hd+"),
        ("--equality-tokens 100 --weights int8", "python experiments/equality.py --tokens 100 --weights int8"),
        ("--equality-tokens=100", "python experiments/equality.py --tokens=100"),
    ],
)
def test_old_spellings_have_new_ones(old, new):
    assert str(new_spelling(old.split())) == new


def test_an_old_spelling_still_works_with_a_hint(capsys):
    assert main(["bench", "--compare", RECORD, RECORD, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["passed"]
    assert err == f"hierspec: this is now spelled: hierspec bench compare {RECORD} {RECORD} --json\n"
    assert main(["bench", "compare", RECORD, RECORD, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_an_old_spelling_of_an_experiment_still_works_with_a_hint(capsys, monkeypatch, tmp_path):
    assert main(["bench", "--store-times", "--largest", "5"]) == 2
    hint, refused = capsys.readouterr().err.splitlines()
    assert hint == "hierspec: this is now spelled: python experiments/store_times.py --largest 5"
    assert refused == "hierspec: --largest must be at least 100 tokens, not 5."
    monkeypatch.setattr(old_spellings, "_EXPERIMENTS", tmp_path)  # only the wheel is installed
    assert main(["bench", "--store-times"]) == 2
    assert "comes with a clone of the repository" in capsys.readouterr().err


def test_bench_alone_runs_plans(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("hierspec_bench.cli.run.run", lambda arguments: asked.append(arguments.plans) or 0)
    assert main(["bench"]) == 0
    assert main(["bench", "--plans", "lookup"]) == 0
    assert asked == ["auto", "lookup"]
    assert capsys.readouterr().err.splitlines() == ["hierspec: this is now spelled: hierspec bench run --plans lookup"]


def test_peers_are_listed_without_installing_any(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    assert main(["bench", "peers"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["installed"] == {}
    assert "run hierspec bench peers --install openvino." in document["absent_peers"]["openvino"]


def test_without_the_package_a_sentence_gives_the_install_command(capsys, monkeypatch):
    monkeypatch.setattr(hierspec_main, "_entry_points", lambda name: ())
    assert main(["bench", "--plans", "auto"]) == 2
    sentence = "hierspec: The command bench cannot run (it is not installed); install it with: pip install"
    assert capsys.readouterr().err == f"{sentence} 'hierspec[bench]'\n"
    broken = importlib.metadata.EntryPoint("bench", "hierspec_bench.no_such_module:main", hierspec_main.GROUP)
    monkeypatch.setattr(hierspec_main, "_entry_points", lambda name: [broken])
    assert main(["bench"]) == 2
    assert "No module named 'hierspec_bench.no_such_module'); install it with: pip" in capsys.readouterr().err


def test_other_packages_may_add_commands(capsys, monkeypatch):
    added = importlib.metadata.EntryPoint("shout", "builtins:len", hierspec_main.GROUP)
    monkeypatch.setattr(hierspec_main, "_entry_points", lambda name: [added] if name == "shout" else [])
    assert main(["shout", "a", "b"]) == 2  # len of its arguments
    with pytest.raises(SystemExit):
        main(["whisper"])
    assert "There is no command 'whisper'" in capsys.readouterr().err


def test_the_library_never_imports_the_bench():
    for path in (ROOT / "src" / "hierspec").rglob("*.py"):
        imported = re.findall(
            r"^\s*(?:from|import) (hierspec_bench\S*)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert not imported, path


def test_help_of_the_bench_does_not_wait_for_torch():
    code = "import sys, hierspec.cli.main as m\ntry: m.main(['bench', 'run', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
