"""Give a model something that drafts for it.

examples:
  hierspec train skip --output skip.toml
"""

from __future__ import annotations

import argparse

from hierspec.cli import train_skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="skip", required=True)
    skip = parts.add_parser(
        "skip", help="search for layers that the model can leave out when it drafts for itself (no training)",
        description=train_skip.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    train_skip.add_arguments(skip)


def run(arguments: argparse.Namespace) -> int:
    return train_skip.run(arguments)
