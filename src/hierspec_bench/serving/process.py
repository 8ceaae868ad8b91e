"""Servers as separate processes: started on a free port, polled until they answer, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec_bench.serving.client import Address

_PATIENCE = 600.0  # seconds until it must answer: it may have to download a model or compile code
_LOOK_SECONDS = 0.2
_DEFECT, _SHOWN = b"Traceback", 10_000  # what a server's log has if it failed, and how much of its end is shown


@dataclass(frozen=True)
class ServerProcess:
    address: Address
    pid: int

    def resident_bytes(self) -> int:
        """Its resident memory; 0 if the system does not report it."""
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


@contextmanager
def our_server(model: Sequence[str] = (), more: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """Starts `hierspec serve` with these arguments."""
    with server_process([sys.executable, "-m", "hierspec", "serve", *model, *more, "--port", "{port}"]) as started:
        yield started


@contextmanager
def server_process(command: Sequence[str], ready: str = "/health", isolated: bool = False) -> Iterator[ServerProcess]:
    """Starts a server; `{port}` in the command becomes a free port. Its output is shown if it does not come up, or
    if a request failed.

    An `isolated` server belongs to another environment and does not find our packages.
    """
    left_out = ("PYTHONPATH", "PYTHONHOME") if isolated else ()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = Address(f"http://127.0.0.1:{port}")
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [argument.replace("{port}", str(port)) for argument in command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in left_out},
        )
        came_up = False
        try:
            came_up = _comes_up(process, address, ready)
            if not came_up:
                printed.seek(0)
                told = printed.read().decode("utf-8", "replace").strip().splitlines()[-3:]
                raise HierspecError(f"The server {command[0]} did not start ({' / '.join(told) or 'it said nothing'}).")
            yield ServerProcess(address, process.pid)
        finally:
            _stop(process)
            printed.seek(0)
            if came_up and _DEFECT in (log := printed.read()):  # a client only learns that something failed
                sys.stderr.write(log[-_SHOWN:].decode("utf-8", "replace"))


def _comes_up(process: subprocess.Popen[bytes], address: Address, ready: str) -> bool:
    until = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError, EOFError, ValueError):
            status, _ = asyncio.run(address.get(ready))
            if status == 200:
                return True
        time.sleep(_LOOK_SECONDS)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
