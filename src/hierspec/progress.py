"""How library code reports progress. It draws nothing: the command line turns these calls into bars."""

import time
from collections.abc import Callable

# Called with (what is being done, units done, units in all); a total of 0 means unknown.
Progress = Callable[[str, int, int], None]
COMPILING = "Compiling for this processor, once: about {seconds} s"  # what is being done, while code is compiled


def silent(what: str, done: int, total: int) -> None:
    """The progress of callers who do not want to see any."""


# Names of steps, by their first word, in a summary of where the time went; all others are loading.
_SUMMARY = {
    "Fetching": "download",
    "Unpacking": "download",
    "Converting": "convert",
    "Packing": "convert",
    "Compiling": "compile",
    "Choosing": "measure",
    "Measuring": "measure",
}


class Timings:
    """Seconds by step, each from the end of the one before; steps of loading come from progress reports."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._last = clock()

    def add(self, step: str) -> None:
        """The time since the last call belongs to this step."""
        now = self._clock()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._last
        self._last = now

    def reporting(self, progress: Progress) -> Progress:
        """Pass reports on, and time them. A step's first report has nothing done: the time before it is loading."""

        def report(what: str, done: int, total: int) -> None:
            self.add("load" if done == 0 else _SUMMARY.get(what.split()[0], "load"))
            progress(what, done, total)

        return report
