"""The exceptions that users see."""


class HierspecError(Exception):
    """One sentence: what is wrong and what to do about it. The command line prints it as it is and exits with 2."""


class DifferentTexts(HierspecError):
    """Two texts that must be the same differ. The command line exits with 1."""


class OutOfMemory(HierspecError):
    """Memory is short: the machine's, or what the KV cache may take. Fewer requests at once may still be answered."""


class Busy(HierspecError):
    """The queue is full; the same prompt may be accepted a little later."""


def out_of_memory() -> OutOfMemory:
    """The error for a failed allocation, on any device."""
    return OutOfMemory(
        "There is not enough memory left for this request; lower --kv-memory, shorten the prompt, run fewer requests "
        "together, or close other programs."
    )
