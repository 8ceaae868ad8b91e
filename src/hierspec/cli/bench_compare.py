"""`hierspec bench --compare A B`: what changed between two documents."""

from __future__ import annotations

import argparse

from hierspec.cli.bench_table import show_comparison
from hierspec.cli.console import command_line, hand_out
from hierspec.core.errors import HierspecError


def compare(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.tolerance < 1:
        raise HierspecError(f"--tolerance must be from 0 to below 1, not {arguments.tolerance:g}.")
    from hierspec_bench.compare import compare_documents, read_document

    before, after = (read_document(path) for path in arguments.compare)
    compared = compare_documents(before, after, arguments.tolerance)
    if not arguments.json:
        show_comparison(compared)
    hand_out({"command": command_line(), **compared}, arguments.output)
    return 0 if compared["passed"] else 1
