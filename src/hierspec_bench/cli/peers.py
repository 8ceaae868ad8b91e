"""List or install other engines to compare with, each in a virtual environment of its own in the cache.

examples:
  hierspec bench peers                              which are installed, and why others are not
  hierspec bench peers --install                    all but the one that is compiled here
  hierspec bench peers --install llama.cpp-native   that one: needs a C++ compiler and ten to twenty minutes
"""

from __future__ import annotations

import argparse

from hierspec.cli.console import progress_bars
from hierspec.cli.options import names
from hierspec.cli.report import Report
from hierspec.cli.status import USER_ERROR
from hierspec.core.errors import HierspecError
from hierspec_bench.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--install",
        nargs="?",
        const="all",
        metavar="NAMES",
        help="make the environments of these (default: all); llama.cpp-native, compiled for this processor, only by "
        "name: --install all,llama.cpp-native",
    )
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """An engine that cannot be installed does not keep the others from being installed."""
    from hierspec_bench import peers

    chosen = list(peers.ENVIRONMENTS) if arguments.install is None else _chosen(arguments.install)
    installed: dict[str, list[str]] = {}
    absent: dict[str, str] = {}
    with progress_bars() as progress:
        for name in chosen:
            environment = peers.ENVIRONMENTS[name]
            try:
                if arguments.install is None:
                    peers.python_of(environment)
                else:
                    peers.install(environment, progress)
                installed[name] = list(environment.requirements)
            except HierspecError as error:
                absent[name] = str(error)
    builds = {name: build for name in installed if (build := peers.build_of(peers.ENVIRONMENTS[name]))}
    report = Report.of(arguments)
    for name, requirements in installed.items():
        report.line(f"{name}: {', '.join(requirements)}" + (f". {builds[name]}" if name in builds else ""))
    for reason in absent.values():
        report.line(reason)
    document = {"kind": "peers", "installed": installed, "builds": builds, "absent_peers": absent}
    report.document(document, arguments.output)
    return USER_ERROR if absent and arguments.install is not None else 0


def _chosen(text: str) -> list[str]:
    from hierspec_bench.peers import ENVIRONMENTS

    asked = [name.split(":")[0] for name in names(text)]
    every = [name for name, environment in ENVIRONMENTS.items() if not environment.by_name_only]
    chosen = list(dict.fromkeys([*(every if "all" in asked else []), *(name for name in asked if name != "all")]))
    unknown = [name for name in chosen if name not in ENVIRONMENTS]
    if unknown:
        raise HierspecError(f"Unknown engine {unknown[0]!r}; those to install are {', '.join(ENVIRONMENTS)}, or all.")
    return chosen
