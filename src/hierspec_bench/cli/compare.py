"""Show what changed between two records. Nothing is run.

Exits with 1 where the second is slower than noise and --tolerance explain, or lost equality with plain decoding.

example:
  hierspec bench compare before.json after.json --tolerance 0.05
"""

from __future__ import annotations

import argparse

from hierspec.cli.files import InputFile
from hierspec.cli.report import Report, command_line
from hierspec.cli.status import DIFFERENT
from hierspec.core.errors import HierspecError
from hierspec_bench.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=InputFile, metavar="BEFORE", help="what hierspec bench run --output FILE wrote")
    parser.add_argument("after", type=InputFile, metavar="AFTER", help="the same from a later run")
    parser.add_argument(
        "--tolerance", type=float, default=0.05, metavar="X", help="share by which it may be slower (default 0.05)"
    )
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.tolerance < 1:
        raise HierspecError(f"--tolerance must be from 0 to below 1, not {arguments.tolerance:g}.")
    from hierspec_bench.cli.table import show_comparison
    from hierspec_bench.compare import compare_records
    from hierspec_bench.record import Record

    before, after = Record.read(arguments.before), Record.read(arguments.after)
    comparison = compare_records(before, after, arguments.tolerance)
    report = Report.of(arguments)
    show_comparison(comparison, report)
    report.document({"command": command_line(), **comparison}, arguments.output)
    return 0 if comparison["passed"] else DIFFERENT
