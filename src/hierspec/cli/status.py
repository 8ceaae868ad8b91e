"""Exit statuses of all commands."""

DIFFERENT = 1  # texts differ that should be the same, or a comparison found something worse
USER_ERROR = 2  # wrong options, names or files: one sentence says what to do
INTERRUPTED = 130  # Ctrl-C, as shells write it
CLOSED_PIPE = 141  # the reader of our output has gone
