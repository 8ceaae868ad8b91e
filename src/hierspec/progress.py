"""How library code reports progress. It draws nothing: the command line turns these calls into bars."""

from collections.abc import Callable

# Called with (what is being done, units done, units in all); a total of 0 means unknown.
Progress = Callable[[str, int, int], None]
COMPILING = "Compiling for this processor, once: about {seconds} s"  # what is being done, while code is compiled


def silent(what: str, done: int, total: int) -> None:
    """The progress of callers who do not want to see any."""
