"""Build the n-grams that most of the model's own answers have, from its history.

They are the model's own database in the plan hd. Build a history first, and build this again after it has grown.

examples:
  hierspec store build history --prompts prompts.jsonl
  hierspec store build frequent
  hierspec store build frequent ./my-model --count 20000
"""

from __future__ import annotations

import argparse

from hierspec.cli import options
from hierspec.cli.console import note
from hierspec.core.errors import HierspecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("--count", type=int, default=100_000, metavar="N", help="n-grams to keep (default 100,000)")
    parser.add_argument("--size", type=int, default=5, metavar="N", help="tokens of each (default 5)")
    options.add_stores_folder(parser)


def run(arguments: argparse.Namespace) -> int:
    from hierspec.stores.frequent import build_frequent
    from hierspec.stores.history import SHARED

    _, _, home = options.load_home(arguments)
    if not home.has_history():
        raise HierspecError(
            f"There is no history at {home.history}; build one with: hierspec store build history --prompts FILE"
        )
    with home.open_history() as history:
        built = build_frequent(
            home.frequent, history.documents(SHARED), home.vocabulary_hash, arguments.size, arguments.count
        )
    note(f"{built:,} n-grams in {home.frequent}")
    return 0
