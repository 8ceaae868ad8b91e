"""Other engines that a bench was asked for: their names and whether they are there, before anything is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hierspec.cli.console import note
from hierspec.cli.options import names
from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling

_ALL = "all"


def add_allow_missing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="go on without engines that were named and cannot run (with all: those that are not there are left out)",
    )


def check(arguments: argparse.Namespace, samplings: Sequence[Sampling]) -> None:
    """Raises HierspecError for an unknown engine, a named one that is not installed, and options that engines
    ignore."""
    if not arguments.peers:
        return
    if getattr(arguments, "enlarged", ""):
        raise HierspecError("An enlarged model is in no file that other engines could read: leave out --enlarged.")
    from hierspec_bench.peers import ENVIRONMENTS, chosen_kinds, not_handed_on, python_of

    if wrong := not_handed_on(samplings[0]):
        refused = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise HierspecError(f"Other engines get temperature and seed, not {refused}: leave that out, or --peers.")
    kinds, reasons = chosen_kinds(arguments.peers), {}
    for kind in kinds:
        try:
            python_of(ENVIRONMENTS[kind.environment])
        except HierspecError as error:
            reasons[kind.name] = str(error)
    if reasons and not arguments.allow_missing and (_named(arguments) or len(reasons) == len(kinds)):
        raise HierspecError(_refusal(next(iter(reasons.values()))))


def miss(engine: str, reason: str, arguments: argparse.Namespace) -> None:
    """Handles an engine that could not be opened: a note if that is allowed, else HierspecError."""
    if _named(arguments) and not arguments.allow_missing:
        raise HierspecError(_refusal(reason))
    note(f"{engine} is absent: {reason}")


def _named(arguments: argparse.Namespace) -> bool:
    """Whether engines were asked for by name, not as `all`."""
    return _ALL not in names(arguments.peers)


def _refusal(reason: str) -> str:
    return f"{reason.rstrip('. ')}; or go on without it: --allow-missing."
