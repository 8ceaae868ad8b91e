"""Pauses of the machine: moments in which nobody got a processor, because the host gave it to others.

On a shared host a virtual machine may stand still for a second or more. A client of a server sees a gap then that is
not the server's. So a process that does nothing but sleep notes when it woke up late.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from bisect import bisect_left
from operator import itemgetter
from types import TracebackType

_SLEEPER = """
import time
last = time.perf_counter()
while True:
    time.sleep(0.01)
    now = time.perf_counter()
    if now - last > 0.06:
        print(last, now, flush=True)
    last = now
"""


class PauseWatch:
    """Watches while it is entered. Times are those of `time.perf_counter`, which all processes share."""

    def __init__(self) -> None:
        self.pauses: list[tuple[float, float]] = []

    def __enter__(self) -> PauseWatch:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SLEEPER], stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                began, ended = map(float, line.split())
                self.pauses.append((began, ended))

    def within(self, began: float, ended: float) -> float:
        """Seconds of this time in which the machine stood still."""
        total = 0.0
        for first, last in self.pauses[bisect_left(self.pauses, began, key=itemgetter(1)) :]:  # they are in order
            if first >= ended:
                break
            total += min(ended, last) - max(began, first)
        return total
