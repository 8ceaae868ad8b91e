"""An engine that is compiled here is checked, and compiled with fewer instructions where it dies of those it has."""

import json
import signal
import sys
from importlib import import_module
from pathlib import Path

import gguf
import pytest

from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec_bench.peers import ENVIRONMENTS
from hierspec_bench.peers.builds import NATIVE, llama_builds
from hierspec_bench.peers.check import died_by, write_tiny_gguf
from hierspec_bench.peers.install import build_of, install, python_of
from hierspec_bench.peers.process import SERVE, PeerError, Worker

INSTALLING = import_module("hierspec_bench.peers.install")  # the package has a function of that name
SERVER_FLAGS = (
    *("sse4_2", "avx", "f16c", "avx2", "fma", "bmi2", "avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    *("avx512vbmi", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
)
DYING = """
import os, signal

class Worker:
    def open(self, model, setting):
        assert os.path.getsize(model) > 1000
        self.flash = setting["flash"]
        return {}

    def generate(self, request):
        if HOW == "error":
            raise RuntimeError("no such model")
        if HOW == "exit":
            os._exit(7)
        if HOW != "lives" and not self.flash:
            os.kill(os.getpid(), getattr(signal, HOW))
        return {"tokens": [1] * request["max_tokens"], "seconds": 1.0}
"""


def switches(build):
    return dict(part.removeprefix("-D").split("=") for part in build.cmake.split())


def fake_engine(folder, how):
    (folder / "serve.py").write_text(SERVE.read_text())
    (folder / "with_fake.py").write_text(f"HOW = {how!r}\n{DYING}")
    return [sys.executable, folder / "serve.py", "with_fake"]


def test_fewer_instructions_step_by_step_and_never_more_than_the_processor_has():
    native, wide, narrow, none = llama_builds(SERVER_FLAGS)
    assert native == NATIVE
    assert switches(native)["GGML_NATIVE"] == "ON"
    for build in (wide, narrow, none):
        told = switches(build)
        assert (
            told["GGML_NATIVE"] == told["GGML_AMX_INT8"] == told["GGML_AMX_TILE"] == told["GGML_AVX512_BF16"] == "OFF"
        )
        assert told["GGML_OPENMP"] == "ON"
    assert switches(wide)["GGML_AVX512"] == switches(wide)["GGML_AVX512_VNNI"] == "ON"
    assert switches(narrow)["GGML_AVX512"] == "OFF"
    assert switches(narrow)["GGML_AVX2"] == switches(narrow)["GGML_FMA"] == "ON"
    assert {value for name, value in switches(none).items() if name != "GGML_OPENMP"} == {"OFF"}
    assert narrow.words == "with SSE42, AVX, F16C, AVX2, FMA, BMI2 only"


def test_a_processor_without_an_instruction_is_not_told_to_use_it():
    without_parts = [flag for flag in SERVER_FLAGS if flag != "avx512bw"]
    native, narrow, none = llama_builds(without_parts)  # VNNI of 512 bits builds on what is missing
    assert switches(narrow)["GGML_AVX512_VNNI"] == "OFF"
    assert [build.cmake for build in llama_builds(("asimd", "fp"))] == [native.cmake, none.cmake]


@pytest.mark.parametrize(("how", "signal_name"), [("lives", ""), ("SIGILL", "SIGILL"), ("SIGSEGV", "SIGSEGV")])
def test_the_check_tells_the_signal_an_engine_died_by(tmp_path, how, signal_name):
    assert died_by("fake", fake_engine(tmp_path, how)) == signal_name


@pytest.mark.parametrize("how", ["error", "exit"])
def test_what_is_no_signal_is_left_to_whoever_opens_the_engine(tmp_path, how):
    assert died_by("fake", fake_engine(tmp_path, how)) == ""


def test_a_worker_that_died_by_a_signal_says_which(tmp_path):
    worker = Worker("fake", fake_engine(tmp_path, "SIGILL"))
    (tmp_path / "m").write_bytes(bytes(2000))
    worker.ask({"do": "open", "model": str(tmp_path / "m"), "setting": {"flash": False}}, 20)
    with pytest.raises(PeerError, match="The engine fake died by SIGILL while asked to 'generate'"):
        worker.ask({"do": "generate", "max_tokens": 1}, 20)
    late = Worker("fake", [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(PeerError, match="no answer"):
        late.ask({"do": "open"}, 0.3)
    assert late.died_by == ""  # that signal was ours


def test_the_file_of_the_check_has_every_number_format_that_is_compared(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "Q4_0", "Q4_1", "Q8_0"}
    assert (tmp_path / "tiny.gguf").stat().st_size < 2_000_000


@pytest.fixture
def compiling(tmp_path, monkeypatch):
    """Nothing is compiled: the commands are written down, and the engine dies by the signals given, in turn."""
    commands, signals = [], []
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(INSTALLING, "cpu_flags", lambda: frozenset(SERVER_FLAGS))
    monkeypatch.setattr(INSTALLING, "died_by", lambda name, command: signals.pop(0) if signals else "")

    def run(command, environment, progress, doing="", variables=None):
        if command[1:3] == ["-m", "venv"]:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()
        else:
            told = dict(environment.variables) | dict(variables or {})
            commands.append((told["CMAKE_ARGS"], "--force-reinstall" in command, "--no-deps" in command))

    monkeypatch.setattr(INSTALLING, "_run", run)
    return commands, signals


def test_an_engine_that_lives_is_compiled_once(compiling):
    commands, _ = compiling
    native = ENVIRONMENTS["llama.cpp-native"]
    assert install(native) == python_of(native)
    assert commands == [(NATIVE.cmake, False, False)]
    assert build_of(native) == "Compiled for all that the compiler finds in this processor."


def test_an_engine_that_dies_is_compiled_with_fewer_instructions(compiling, capsys):
    commands, signals = compiling
    signals += ["SIGILL", "SIGILL"]
    assert main(["bench", "peers", "--install", "llama.cpp-native"]) == 0
    native, wide, narrow, _ = llama_builds(SERVER_FLAGS)
    assert commands == [(native.cmake, False, False), (wide.cmake, True, True), (narrow.cmake, True, True)]
    said = json.loads(capsys.readouterr().out.splitlines()[-1])["builds"]["llama.cpp-native"]
    assert said.startswith(
        f"Compiled {narrow.words}; it died by SIGILL when compiled {native.words} and died by SIGILL "
    )
    assert main(["bench", "peers"]) == 0  # and is told also later
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["builds"]["llama.cpp-native"] == said


def test_an_engine_that_always_dies_is_not_installed(compiling):
    commands, signals = compiling
    signals += ["SIGILL"] * 4
    native = ENVIRONMENTS["llama.cpp-native"]
    with pytest.raises(HierspecError, match=r"could not be installed \(it died by SIGILL when compiled for all"):
        install(native)
    assert len(commands) == 4
    with pytest.raises(HierspecError, match="for any processor of its kind"):
        python_of(native)


def test_signals_have_numbers_that_python_may_not_know():
    process = import_module("hierspec_bench.peers.process")
    assert process._signal_name(-signal.SIGILL) == "SIGILL"
    assert process._signal_name(-200) == "signal 200"
    assert process._signal_name(None) == process._signal_name(3) == ""
