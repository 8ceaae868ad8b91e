"""Where the time went, and what is said where there is no terminal."""

from hierspec.cli.console import progress_bars
from hierspec.progress import COMPILING, Timings, silent


def test_time_belongs_to_the_step_that_was_reported():
    ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0])
    timings, passed_on = Timings(lambda: next(ticks)), []
    timings.add("set-up")
    report = timings.reporting(lambda *call: passed_on.append(call))
    report("Fetching a model", 5, 9)  # 1 to 3
    report(COMPILING.format(seconds=7), 0, 9)  # 3 to 6: before it began
    report(COMPILING.format(seconds=7), 9, 9)
    report("Loading weights", 1, 2)
    report("Choosing a dtype (once)", 1, 1)
    timings.add("answer")
    assert timings.seconds == {"set-up": 1, "download": 2, "load": 3 + 5, "compile": 4, "measure": 6, "answer": 7}
    assert len(passed_on) == 5
    Timings().reporting(silent)("anything", 0, 0)


def test_where_stderr_is_no_terminal_compiling_is_two_lines(capsys):
    what = COMPILING.format(seconds=7)
    with progress_bars() as progress:
        for done in (0, 3, 9):
            progress("Loading weights", done, 9)
            progress(what, done, 9)
    out, err = capsys.readouterr()
    assert not out
    first, second = err.splitlines()
    assert first == "Compiling for this processor, once: about 7 s …"
    assert second.startswith("Compiled in ")
