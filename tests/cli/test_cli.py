"""The command line as a stranger meets it: what it prints where, and one sentence for everything that goes wrong."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from hierspec.cli.completion import command_words
from hierspec.cli.main import extra_parsers, main, make_parser
from hierspec.testing.checkpoints import tiny_checkpoint

PROGRAM = [sys.executable, "-m", "hierspec"]


ALL_COMMANDS = [command.path for command in command_words("", make_parser(), extra_parsers()) if command.path]


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert re.search(rf"hierspec {command}\b", capsys.readouterr().out.split("example")[1])


def test_generate_writes_the_text_to_stdout_and_the_rest_to_stderr(tiny, capsys):
    assert main(["generate", tiny, "-p", "abc", "--max-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "tokens/s" in err
    assert "tokens/s" not in out


def test_check_says_identical(tiny, capsys):
    assert main(["generate", tiny, "-p", "abc abc", "--max-tokens", "20", "--check", "--plan", "hispec"]) == 0
    assert "identical to plain" in capsys.readouterr().err


def test_json_is_one_document(tiny, capsys):
    arguments = ["generate", tiny, "-p", "abc", "--max-tokens", "9", "--temperature", "0.8", "--seed", "4"]
    assert main([*arguments, "--exit", "2", "--json", "--check"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is True
    assert len(found["tokens"]) == 9
    assert [tier["tier"] for tier in found["tiers"]] == ["target", "exit 2"]
    assert {"set-up", "load", "measure", "plain", "answer"} <= set(found["timings"])


def test_colour_marks_drafted_tokens(tiny, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["generate", tiny, "-p", "abab abab", "--max-tokens", "60", "--colour"]) == 0
    out, err = capsys.readouterr()
    assert "drafted by:" in err
    assert ("\x1b[" in out) == ("context" in err)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["generate", tiny, "-p", "abab abab", "--max-tokens", "60", "--colour"]) == 0
    assert "\x1b[3" not in capsys.readouterr().out


def test_bench_ends_with_the_document_and_writes_it(tiny, tmp_path, capsys):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "result.json"
    prompts.write_text('{"task": "a", "turns": ["abc", "more"]}\n')
    arguments = ["bench", "run", tiny, "--prompts", str(prompts), "--plans", "lookup", "--max-tokens", "6"]
    assert main([*arguments, "--output", str(output)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(output.read_text())
    assert document["plans"]["lookup"]["identical"] == 1


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_bench_does_not_ask_of_other_rules_what_they_do_not_promise(tiny, tmp_path, capsys, rule):
    prompts, plan = tmp_path / "p.jsonl", tmp_path / f"{rule}.toml"
    prompts.write_text('{"task": "a", "turns": ["abc"]}\n')
    plan.write_text(f'rule = "{rule}"\n[[tier]]\nexit_layer = 2\n')
    arguments = ["bench", "run", tiny, "--prompts", str(prompts), "--plans", str(plan), "--max-tokens", "30", "--json"]
    assert main([*arguments, "--temperature", "1", "--seed", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert found[str(plan)]["identical"] == 0
    assert (found[str(plan)]["rule"], found[str(plan)]["promises_text"]) == (rule, False)
    assert (found["plain"]["rule"], found["plain"]["promises_text"]) == ("coupled", True)
    assert main([*arguments[:-1], "--temperature", "1", "--seed", "1"]) == 0
    assert "same distribution" in capsys.readouterr().err
    assert main(arguments) == 0  # greedy there is only one text
    assert json.loads(capsys.readouterr().out)["plans"][str(plan)]["identical"] == 1


def test_plan_files_are_used(tiny, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text('stores = ["context"]\n[[tier]]\nexit_layer = 2\ngather = 3\n')
    assert main(["generate", tiny, "-p", "abc", "--plan", str(path), "--max-tokens", "9", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tiers"]) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-p", "x", "--temperature", "-1"], "temperature must be a finite number from 0 up"),
        (["-p", "x", "--top-p", "0"], "top_p must be"),
        (["-p", "x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["-p", "x" * 2000], "shorten the prompt"),
        (["-p", "x", "--kv-memory", "10K"], "raise --kv-memory"),
        (["-p", "x", "--dtype", "int1"], "Unknown dtype"),
        (["-p", "x", "--backend", "magic"], "choose auto, compiled, compiled-vectors, torch"),
        (["-p", "x", "--backend", "compiled", "--dtype", "float16"], "use --backend torch"),
        (["-p", "x", "--device", "cuda"], "No CUDA GPU"),
        (["-p", "x", "--raw", "--system", "y"], "leave out --raw"),
    ],
)
def test_bad_input_is_one_sentence_and_a_status(tiny, capsys, arguments, told):
    import torch

    if "--device" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA GPU")
    status = main(["generate", tiny, *arguments])
    err = capsys.readouterr().err
    assert status == 2
    assert told in err
    assert err.startswith("hierspec: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "config.json").write_text("{"), "damaged"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), "damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    ],
)
def test_damaged_folders_are_one_sentence(tmp_path, capsys, damage, told):
    folder = tiny_checkpoint(tmp_path / "damaged", "llama")
    damage(folder)
    assert main(["generate", str(folder), "-p", "x"]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_weights_that_are_no_numbers_are_told(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path / "nan", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors")
    assert main(["generate", str(folder), "-p", "x"]) == 2
    assert "not numbers" in capsys.readouterr().err


def test_control_c_in_a_stream_stops_cleanly(tmp_path):
    # Writes on for seconds, so that it cannot have ended by itself, however late the signal comes.
    endless = str(tiny_checkpoint(tmp_path / "endless", seed=3, layers=24, context=20_000))
    running = subprocess.Popen(
        [*PROGRAM, "generate", endless, "-p", "abc", "--max-tokens", "19000", "--raw", "--plan", "plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it
    )
    assert running.stdout is not None
    running.stdout.read(1)  # it has begun to write
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert b"Traceback" not in err
    assert b"Stopped after" in err


def test_a_reader_that_goes_away_is_no_error(loaded, monkeypatch, capsys):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    assert main(["generate", "-p", "abc", "--max-tokens", "9"]) == 141
    assert capsys.readouterr().err == ""


def test_help_does_not_wait_for_torch():
    code = "import sys, hierspec.cli.main as m\ntry: m.main(['generate', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_core_needs_no_torch():
    code = "import sys, hierspec.core.engine, hierspec.core.plan, hierspec.stores, hierspec.testing.fakes\n"
    code += "assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_check_does_not_find_its_own_answer(tiny, capsys):
    """Its warm-up must leave nothing in a history that the timed run would draft from."""
    command = ["generate", str(tiny), "-p", "abc", "--plan", "hd+", "--max-tokens", "8", "--json"]
    passes = []
    for options in ([], ["--check"]):
        assert main([*command, *options]) == 0
        passes.append(json.loads(capsys.readouterr().out)["tokens_per_pass"])
    assert passes[0] == passes[1]


def test_an_enlarged_model_writes_the_same_and_says_what_it_is(tiny, capsys):
    arguments = [
        "generate",
        tiny,
        "-p",
        "abc",
        "--max-tokens",
        "20",
        "--plan",
        "layerskip",
        "--json",
        "--dtype",
        "float32",
    ]
    assert main(arguments) == 0
    small = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--check", "--enlarged", "hidden=96,heads=12,kv-heads=4,layers=6"]) == 0
    large = json.loads(capsys.readouterr().out)
    assert large["identical"] is True
    assert large["tokens"] == small["tokens"]
    assert main([*arguments, "--enlarged", "9B"]) == 2
    assert "cannot be enlarged to '9B'" in capsys.readouterr().err
    assert main(["bench", "run", tiny, "--enlarged", "8B", "--peers", "transformers"]) == 2
    assert "leave out --enlarged" in capsys.readouterr().err
