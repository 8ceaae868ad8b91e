"""The exceptions that users see."""


class HierspecError(Exception):
    """One sentence: what is wrong and what to do about it. The command line prints it as it is and exits with 2."""


class DifferentTexts(HierspecError):
    """Two texts that must be the same differ. The command line exits with 1."""
