"""Mistakes: one sentence, a status, and no model loaded for them; whatever the encoding."""

import io
import json
import os
import subprocess
import sys

import pytest
from soak import command_lines

from hierspec.cli.main import main, run_safely
from hierspec.core.errors import DifferentTexts, HierspecError

LONG = "a" * 300


def refused(arguments, capsys):
    """The sentence of a command line that is refused."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    err = capsys.readouterr().err
    assert status == 2, err
    assert err.startswith("hierspec: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "--promp", "x"], "no option --promp (did you mean --prompt?); see hierspec generate --help"),
        (["generate", "--max", "3"], "no option --max"),
        (["store", "build", "corpus", "--files", "y", "--file", "x"], "no option --file (did you mean --files?)"),
        (["bench", "run", "--plan", "auto"], "no option --plan (did you mean --plans?); see hierspec bench run --help"),
        (["generate", "-p", "x", "-f", "y"], "-f/--file cannot be given together with -p/--prompt"),
        (["plan", "--save", "--show"], "--show cannot be given together with --save"),
        (["generate", "--max-tokens", "many"], "--max-tokens takes a whole number, not 'many'"),
        (["generate", "--top-p", "most"], "--top-p takes a number, not 'most'"),
        (["generate", "-p"], "-p/--prompt needs a value"),
        (["generate", "--raw=yes"], "--raw takes no value"),
        (["generate", "model", "another"], "'another' is one argument too many"),
        (["train", "exits"], "--output is missing"),
        (["train", "draft", "--kind", "big"], "--kind cannot be 'big'"),
        (["completion", "tcsh"], "cannot be 'tcsh'"),
        (["sing"], "There is no command 'sing'"),
        ([], "COMMAND is missing"),
    ],
)
def test_what_cannot_be_parsed_is_one_sentence(arguments, told, capsys):
    assert told in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-p", ""], "The prompt is empty"),
        (["-p", " \n"], "The prompt is empty"),
        (["-p", "", "--raw"], "The prompt is empty"),
        (["-p", "a\udcffb"], "-p/--prompt is not UTF-8 text"),
        (["-p", "x", "--system", "\udcff"], "--system is not UTF-8 text"),
        (["-p", "x", "--stop", "\udcff"], "--stop is not UTF-8 text"),
        (["-p", "x", "--plan", LONG], "--plan is too long for a name"),
        (["-p", "x", "--plan", "a\0b"], "--plan holds a NUL"),
        (["-p", "x", "--plan", "hispek"], "did you mean 'hispec'?"),
        (["-p", "x", "--plan", "missing.toml"], "cannot be read"),
        (["-p", "x", "--plan", "."], "no plan or plan file"),
        (["-p", "x", "--draft", LONG], "--draft is too long for a name"),
        (["-p", "x", "--draft", "no/such/folder"], "no model at"),
        (["-p", "x", "--exit", "9"], "has 4 layers"),
        (["-p", "x", "--exit", "0"], "at least 1"),
        (["-p", "x", "--pack", "."], "is not a pack"),
        (["-p", "x", "--stores", LONG], "--stores is too long for a name"),
        (["-f", LONG], "-f/--file is too long for a name"),
        (["-f", ""], "-f/--file needs a name"),
        (["-f", "missing.txt"], "there is no such file"),
        (["-f", "."], "is a folder"),
        (["-p", "x", "--threads", "9" * 30], "--threads must be from 1 to"),
        (["-p", "x", "--kv-memory", "lots"], "write it like 500M or 4G"),
    ],
)
def test_names_are_looked_at_before_a_model_is_loaded(arguments, told, tiny, loaded, capsys):
    assert told in refused(["generate", tiny, *arguments], capsys)
    assert loaded == []


def test_exits_of_plan_files_are_looked_at_before_a_model_is_loaded(tmp_path, tiny, loaded, capsys):
    plan = tmp_path / "deep.toml"
    plan.write_text("[[tier]]\nexit_layer = 9\n")
    assert "has 4 layers" in refused(["generate", tiny, "-p", "x", "--plan", str(plan)], capsys)
    assert "has 4 layers" in refused(["bench", "run", tiny, "--plans", f"plain,{plan}"], capsys)
    assert loaded == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "run", "--plans", "auto,hispek"], "did you mean 'hispec'?"),
        (["bench", "run", "--plans", f"auto,{LONG}"], "A name of --plans is too long for a name"),
        (["bench", "run", "--peers", "nobody"], "Unknown engine 'nobody'"),
        (["bench", "passes", "--peers", "vllm"], "Passes of 'vllm' cannot be measured"),
        (["bench", "run", "--prompts", "missing.jsonl"], "cannot be read"),
        (["bench", "run", "--output", "."], "is a folder"),
        (["bench", "run", "--report", "file/below.html"], "is a file, not a folder"),
        (["bench", "compare", "missing.json", "missing.json"], "there is no such file"),
        (["plan", "--prompts", "missing.jsonl"], "there is no such file"),
        (["plan", "--show", "--output", "x.toml"], "leave it out"),
        (["train", "draft", "--output", "file"], "is a file; name a folder"),
        (["train", "draft", "--output", "/"], "has no name of its own"),
        (["train", "draft", "--output", "."], "has no name of its own"),
        (["train", "draft", "--output", "x", "--text", "missing.txt"], "there is no such file"),
        (["train", "measure", "--prompts", "file", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["store", "build", "corpus", "--files", "missing.txt"], "there is no such file"),
        (["store", "replay", "missing.jsonl"], "there is no such file"),
        (["cache", "prune", "--kind", "gold"], "The cache holds no kind 'gold'"),
        (["cache", "prune", "--older-than", "long"], "write it like 12h, 30d or 8w"),
        (["cache", "prune", "--keep-size", "little"], "write it like 500M or 4G"),
    ],
)
def test_every_command_looks_at_names_first(arguments, told, loaded, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert told in refused(arguments, capsys)
    assert loaded == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_files_that_may_not_be_read_are_told(tmp_path, loaded, capsys):
    secret = tmp_path / "secret.txt"
    secret.touch(mode=0)
    assert "not permitted" in refused(["generate", "-f", str(secret)], capsys)
    assert loaded == []


def test_a_named_engine_that_is_missing_is_an_error_unless_that_is_allowed(loaded, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    allowed = "or go on without it: --allow-missing"
    assert allowed in refused(["bench", "run", "--baselines", "vllm"], capsys)
    assert allowed in refused(["bench", "run", "--baselines", "all"], capsys)  # none is installed
    assert loaded == []
    monkeypatch.setattr("hierspec_bench.run.SideBySide.run", lambda *a: pytest.fail("it went on"))
    with pytest.raises(pytest.fail.Exception, match="it went on"):
        main(["bench", "run", "--baselines", "vllm", "--allow-missing", "--limit", "1"])
    assert "vllm is absent" in " ".join(capsys.readouterr().err.split())


def test_the_old_spelling_of_the_model_works_with_a_hint(tiny, tmp_path, capsys):
    at = ["--stores", str(tmp_path)]
    assert main(["store", "info", "--model", tiny, *at]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == f"hierspec: this is now spelled: hierspec store info {tiny} --stores {tmp_path}"
    assert main(["store", "info", tiny, *at]) == 0
    again, err = capsys.readouterr()
    assert again == out
    assert "spelled" not in err
    text = tmp_path / "text.txt"
    text.write_text("abc " * 300)
    assert main(["store", "build", "corpus", str(text), f"--model={tiny}", *at]) == 0
    hint = f"hierspec store build corpus {tiny} --files {text} --stores {tmp_path}"
    assert capsys.readouterr().err.splitlines()[0] == f"hierspec: this is now spelled: {hint}"


def test_statuses(capsys):
    def fails(error):
        def command():
            raise error

        return run_safely(command)

    assert run_safely(lambda: 0) == 0
    assert run_safely(lambda: 1) == 1
    assert fails(HierspecError("No.")) == 2
    assert fails(DifferentTexts("Not the same.")) == 1
    assert fails(KeyboardInterrupt()) == 130
    assert fails(BrokenPipeError()) == 141
    capsys.readouterr()
    assert fails(MemoryError()) == 2
    assert fails(PermissionError(13, "Permission denied", "some.file")) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("hierspec: There is not enough memory")
    assert err[1] == "hierspec: some.file cannot be read or written (Permission denied)."


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_an_encoding_lacks_are_escaped(encoding, loaded, monkeypatch):
    """What the tiny model writes is full of letters that only UTF-8 has."""
    for more in ([], ["--json"], ["--colour"]):
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert main(["generate", "-p", "é€😀", "--max-tokens", "60", *more]) == 0
        out.flush()
        text = out.buffer.getvalue().decode(encoding)
        if more == ["--json"]:
            assert "\ufffd" in json.loads(text)["text"]
        else:
            assert ("\ufffd" in text) == (encoding == "utf-8")
            assert ("\\ufffd" in text) == (encoding != "utf-8")


def test_a_stream_that_is_closed_or_full_is_no_traceback():
    """Of a real process: the interpreter flushes once more when it ends."""
    for redirected, status in ((">&-", 0), (">/dev/full", 2), ("| true", 0)):
        command = f"{sys.executable} -m hierspec completion bash {redirected}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.returncode == status
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
        assert done.stderr.count("\n") == (status == 2)


def test_random_command_lines_end_with_a_sentence():
    record = command_lines.run(seed=3, count=150, report=lambda text: None)
    assert record["failures"] == []
    assert {"0", "2"} <= set(record["statuses"])
