"""--history: where a model's answers are remembered."""

from __future__ import annotations

import argparse
import os

from hierspec.cli.files import OutputFile
from hierspec.cli.parser import text
from hierspec.core.errors import HierspecError

_VARIABLE = "HIERSPEC_HISTORY"  # a URL may hold a password, which everybody on the machine could read in an option


def add_history(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--history",
        type=_file_or_url,
        metavar="FILE|URL",
        help="its history: a file, or redis://HOST:PORT/NUMBER, which many servers may share "
        f"(also from {_VARIABLE}; default: in --stores, once it was built)",
    )


def chosen_history(arguments: argparse.Namespace) -> str | None:
    """What --history or the environment names. A database must answer: a mistake would not be noticed later."""
    from hierspec.stores import check_history

    named = arguments.history or os.environ.get(_VARIABLE)
    check_history(named)
    return str(named) if named else None


def _file_or_url(value: str) -> OutputFile | str:
    from hierspec.stores.redis_address import RedisAddress, is_url

    if not is_url(text(value)):
        return OutputFile(value)
    try:
        RedisAddress.of(value)
    except HierspecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value
