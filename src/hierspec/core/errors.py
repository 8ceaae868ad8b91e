"""The one exception that users see."""


class HierspecError(Exception):
    """One sentence: what is wrong and what to do about it. The command line prints it as it is and exits with 2."""
