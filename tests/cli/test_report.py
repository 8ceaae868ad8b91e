"""Tables for people and documents for programs: on a terminal, in a pipe, with --json; all within 80 columns."""

import json
import re
from pathlib import Path

import pytest

from hierspec.cli.console import progress_bars
from hierspec.cli.main import main
from hierspec.cli.report import Report, table_lines

ROOT = Path(__file__).parents[2]
RECORD = str(ROOT / "docs" / "results" / "auto-greedy.json")
WIDE = str(ROOT / "docs" / "results" / "peers-own.json")
WHAT_IF = ["plan", "--simulate", str(ROOT / "examples" / "whatif_hispec.toml")]
COMMANDS = [["bench", "compare", RECORD, RECORD], ["cache"], ["bench", "peers"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_documents_go_to_programs_and_tables_to_people(command, terminal, monkeypatch, tmp_path):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    (tmp_path / "plans").mkdir()  # an empty cache is no table
    (tmp_path / "plans" / "plan.json").write_text("{}")
    assert main(command) == 0
    out, err = terminal.readouterr()
    assert "{" not in out
    assert len(out.splitlines()) >= 2
    assert err == ""
    assert main([*command, "--json"]) == 0
    out, err = terminal.readouterr()
    assert json.loads(out)
    assert err == ""
    monkeypatch.undo()  # standard output is a pipe again
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    assert main(command) == 0
    out, err = terminal.readouterr()
    assert json.loads(out)
    assert len(err.splitlines()) >= 2


def test_the_text_of_generate_is_bare_in_a_pipe_too(loaded, capsys):
    assert main(["generate", "-p", "abc", "--max-tokens", "8", "--seed", "1"]) == 0
    text = capsys.readouterr().out
    assert main(["generate", "-p", "abc", "--max-tokens", "8", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] + "\n" == text


def test_an_answer_that_was_cut_says_so(loaded, tiny_model, capsys):
    assert main(["generate", "-p", "abc", "--max-tokens", "5"]) == 0
    assert "cut after 5 tokens, the limit; --max-tokens raises it" in capsys.readouterr().err
    assert main(["generate", "-p", "abc", "--max-tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] == "length"
    prompt = "x" * (tiny_model.config.context - 10)
    assert main(["generate", "-p", prompt, "--raw", "--max-tokens", "99"]) == 0
    assert "the model's context is full" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench", "compare", RECORD, RECORD], ["bench", "compare", WIDE, WIDE], WHAT_IF])
def test_tables_fit_80_columns(command, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command) == 0
    rows = [line for line in terminal.readouterr().out.splitlines() if re.search(r"\d  +\S|---", line)]
    assert rows
    assert max(map(len, rows)) <= 80


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").glob("*.json")), ids=lambda path: path.name)
def test_tables_of_all_records_fit_80_columns(path, terminal, monkeypatch):
    from hierspec.core.errors import HierspecError
    from hierspec_bench.cli.table import show
    from hierspec_bench.record import Record

    monkeypatch.setenv("COLUMNS", "80")
    try:
        record = Record.read(path)
    except HierspecError:
        pytest.skip("a record of something else")
    show(record, Report())
    rows = [line for line in terminal.readouterr().out.splitlines() if re.search(r"x  +\d|---", line)]
    assert max(map(len, rows)) <= 80


def test_a_table_folds_its_first_column_and_cuts_no_number():
    rows = [("a name that is much too long for its column " * 2, "12345.678", "x"), ("  part", "1", "y")]
    lines = table_lines("Title", ("name", "first\nfigure", "second"), rows, width=40)
    assert max(map(len, lines)) <= 40
    assert sum("12345.678" in line for line in lines) == 1
    assert [line.split() for line in lines[1:3]] == [["name", "first", "second"], ["figure"]]
    assert lines[-1].startswith("  part")
    assert lines[-1].endswith("y")


def test_files_hold_names_that_are_no_text(tmp_path):
    output = tmp_path / "out.json"
    Report(json=True).document({"command": "hierspec \udcff"}, output)
    assert json.loads(output.read_text(encoding="utf-8")) == {"command": "hierspec \udcff"}


def test_what_takes_long_is_named_once_where_no_terminal_is(monkeypatch, capsys):
    timers = []

    class Timer:
        """Tells what would be shown, and when."""

        def __init__(self, seconds, show):
            self.show, self.ended = show, False
            timers.append(self)

        def start(self):
            pass

        def cancel(self):
            self.ended = True

    monkeypatch.setattr("hierspec.cli.console.threading.Timer", Timer)
    with progress_bars() as progress:
        for done in range(3):
            progress("Quick", done, 2)
            progress("Slow", done, 9)
        assert [timer.ended for timer in timers] == [True, False]
        timers[1].show()
    assert all(timer.ended for timer in timers)
    assert capsys.readouterr().err == "Slow …\n"
