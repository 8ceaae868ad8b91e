"""A real Redis server on a free port of this machine, which tests may kill, stop and start again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

WHY_NOT = "" if shutil.which("redis-server") else "there is no redis-server (Debian: apt-get install redis-server)"
needs_redis = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def until(condition, what: str, seconds: float = 60.0):
    """Waits for something that must come, however slow the machine is."""
    for _ in range(int(seconds / 0.01)):
        if result := condition():
            return result
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come in {seconds} s")


class RedisServer:
    """Its data are in `folder` and outlive its process."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.port, self.options = folder, free_port(), options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--appendonly", "yes", "--save", "", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers, "Redis")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        assert self.process.poll() is None, "Redis ended"
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64)[:1] == b"+" or bool(self.options)
        except OSError:
            return False
