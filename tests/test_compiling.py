"""Workers that compile: what they do, and how they end, with jobs that only write a file."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hierspec import compiling
from hierspec.compiling import _shares, locked

MODULE = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent
STARTED_HERE = int(os.environ["MAIN_PROCESS"])

class Job:
    def __init__(self, name, seconds, before=lambda: None):
        self.name, self.seconds, self.before = f"made_up_jobs:{name}", seconds, before
        self.file, self.loaded = HERE / name, False

    def cached(self):
        return self.file.exists()

    def load(self):
        if not self.file.exists():
            self.before()
            self.file.write_text(str(os.getpid()))
        self.loaded = True

def die_in_a_worker():
    if os.getpid() != STARTED_HERE:
        os._exit(1)

def wait():
    # Under its name only once it holds the number: a reader who sees the file may read it at once.
    (HERE / "worker being written").write_text(str(os.getpid()))
    (HERE / "worker being written").rename(HERE / "worker")
    time.sleep(300)

FIRST, SECOND, THIRD = Job("FIRST", 1), Job("SECOND", 2), Job("THIRD", 4)
DEADLY, ENDLESS = Job("DEADLY", 1, die_in_a_worker), Job("ENDLESS", 1, wait)
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    (tmp_path / "made_up_jobs.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MAIN_PROCESS", str(os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up_jobs", raising=False)
    import made_up_jobs

    yield made_up_jobs
    compiling.stop()
    sys.modules.pop("made_up_jobs", None)


def eventually(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self/stat").exists()


def test_others_compile_what_is_missing_and_progress_is_true(jobs):
    jobs.SECOND.file.write_text("compiled earlier")
    reports = []
    all_jobs = [jobs.FIRST, jobs.SECOND, jobs.THIRD]
    compiling.finish(all_jobs, lambda *report: reports.append(report))
    assert all(job.loaded for job in all_jobs)
    assert jobs.SECOND.file.read_text() == "compiled earlier"
    assert str(os.getpid()) not in {job.file.read_text() for job in all_jobs}
    [what] = {report[0] for report in reports}
    assert what.startswith("Compiling for this processor, once: about ")
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
    assert (reports[0][1], reports[-1][1], {total for _, _, total in reports}) == (0, 50, {50})


def test_nothing_is_said_or_started_where_all_is_there(jobs, monkeypatch):
    jobs.FIRST.file.write_text("")
    monkeypatch.setattr(compiling.subprocess, "Popen", lambda *_, **__: pytest.fail("a worker was started"))
    compiling.finish([jobs.FIRST], lambda *_: pytest.fail("progress of nothing"))
    assert jobs.FIRST.loaded


def test_whatever_happens_to_a_worker_everything_is_compiled(jobs):
    compiling.finish([jobs.DEADLY, jobs.FIRST])
    assert jobs.DEADLY.loaded
    assert jobs.FIRST.loaded
    assert jobs.DEADLY.file.read_text() == str(os.getpid())


@pytest.mark.parametrize("executable", ["", "/usr/bin/an-editor"])
def test_a_program_that_is_not_python_compiles_by_itself(jobs, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    compiling.finish([jobs.FIRST])
    assert jobs.FIRST.file.read_text() == str(os.getpid())


def test_an_interrupt_ends_the_workers(jobs):
    def interrupted(*report):
        eventually((jobs.HERE / "worker").exists)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiling.finish([jobs.ENDLESS], interrupted)
    assert not is_running(int((jobs.HERE / "worker").read_text()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(jobs, how):
    script = (
        "import time, made_up_jobs as m; from hierspec import compiling; compiling.start([m.ENDLESS]); time.sleep(300)"
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(compiling.__file__).parents[1])])
    starter = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path})
    try:
        eventually((jobs.HERE / "worker").exists)
        worker = int((jobs.HERE / "worker").read_text())
        assert is_running(worker)
    finally:
        starter.send_signal(how)
        starter.wait()
    eventually(lambda: not is_running(worker))


def test_work_is_shared_evenly(jobs):
    shares = _shares([jobs.FIRST, jobs.SECOND, jobs.THIRD], 2)
    assert shares == [["made_up_jobs:THIRD"], ["made_up_jobs:SECOND", "made_up_jobs:FIRST"]]
    assert _shares([jobs.FIRST], 4) == [["made_up_jobs:FIRST"]]


def test_one_at_a_time_holds_a_lock(tmp_path):
    entered, order = threading.Event(), []

    def second():
        entered.set()
        with locked(str(tmp_path), "name"):
            order.append("second")

    with locked(str(tmp_path), "name"):
        other = threading.Thread(target=second)
        other.start()
        entered.wait()
        time.sleep(0.1)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
    with locked(None, "name"), locked("/proc/no/such/folder", "name"):
        pass  # where there is nowhere to lock, nobody waits
