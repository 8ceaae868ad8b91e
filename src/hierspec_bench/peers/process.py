"""An engine in its own process, which reads and writes JSON lines: it may crash, hang or print; we report that."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError

SERVE = Path(__file__).parent / "workers" / "serve.py"  # run by the Python of an engine's environment
_CLOSING_SECONDS = 3.0
_PATIENCE_SECONDS = 1.0
# Threads that wait long must sleep, because other engines are measured meanwhile; threads that wait a millisecond for
# the next product must not, or the engine slows down. The engine sees none of our packages.
_ENVIRONMENT = {
    "KMP_BLOCKTIME": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONNOUSERSITE": "1",
    "OPENVINO_TELEMETRY": "0",
}
_NOT_HANDED_ON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


class PeerError(HierspecError):
    """An engine that did not do what it was asked to."""


class Worker:
    """One running worker. `ask` sends a request and waits for its answer.

    It ends with the thread that started it.
    """

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        variables = {key: value for key, value in os.environ.items() if key not in _NOT_HANDED_ON}
        variables |= _ENVIRONMENT | {"HIERSPEC_PARENT": str(os.getpid())} | dict(environment or {})
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115, open while the process may write; appends where we read
        try:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=variables,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"The engine {name} cannot be started ({error.strerror or error}).") from error
        self.died_by = ""  # the signal that killed it, such as SIGILL, if it was not ours
        self._closed = False
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer; PeerError if none arrives in time, or if it reports an error."""
        assert self._process.stdin is not None
        try:
            self._signal("SIGCONT")
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # a broken pipe, or one that we closed
            self.close(at_once=True)
            raise self._broken("has ended") from error
        try:
            line = self._next_line(timeout)
        except queue.Empty as error:
            self.close(at_once=True)
            raise self._broken(f"gave no answer to {request['do']!r} within {timeout:g} seconds") from error
        if line is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSING_SECONDS)  # to learn how it ended
            self.died_by = _signal_name(self._process.returncode)
            self.close(at_once=True)
            how = f"died by {self.died_by}" if self.died_by else f"ended with {self._process.returncode}"
            raise self._broken(f"{how} while asked to {request['do']!r}")
        self._signal("SIGSTOP")  # whatever its threads do while waiting: others are measured now
        try:
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            self.close(at_once=True)
            raise self._broken(f"answered something else than a JSON object ({line[:60]!r})") from error
        if "error" in answer:
            raise PeerError(f"The engine {self.name} says: {str(answer['error']).rstrip('.')}.")
        return answer

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def _next_line(self, timeout: float) -> bytes | None:
        """Waits in short steps, so that an hour in which the whole machine was paused counts as one step."""
        while timeout > _PATIENCE_SECONDS:
            try:
                return self._lines.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                timeout -= _PATIENCE_SECONDS
        return self._lines.get(timeout=timeout)

    def _broken(self, what: str) -> PeerError:
        line = self.last_line()
        return PeerError(f"The engine {self.name} {what}" + (f"; its last line: {line}." if line else "."))

    def last_line(self) -> str:
        """The last line that it wrote to standard error."""
        try:
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - 4000))
            lines = self._errors.read().decode(errors="replace").split("\n")
        except ValueError:  # closed
            return ""
        return next((line.strip().rstrip(".")[:300] for line in reversed(lines) if line.strip()), "")

    def _signal(self, name: str) -> None:
        """Signals the worker and its children; does nothing if it has ended or the system has no such signal."""
        if hasattr(os, "killpg") and self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, getattr(signal, name))

    def close(self, at_once: bool = False) -> None:
        """Asks it to end, and kills it if it does not. Only once: its process id may later belong to another
        process."""
        if self._closed:
            return
        self._closed = True
        if not at_once:
            try:
                self._signal("SIGCONT")
                assert self._process.stdin is not None
                self._process.stdin.write(b'{"do": "close"}\n')
                self._process.stdin.close()
                self._process.wait(_CLOSING_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                pass
        if hasattr(os, "killpg"):  # even if it has ended: its children may live on
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()


def _signal_name(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return ""
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
