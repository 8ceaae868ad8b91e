"""Build a corpus, a large text that drafts are looked up in, from .txt, .jsonl (also .gz) and .parquet files.

A stopped build resumes when the same command is given again.

examples:
  hierspec store build corpus --files books/*.txt chats.jsonl
  hierspec store build corpus ./my-model --files books/*.txt
"""

from __future__ import annotations

import argparse

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.files import InputFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("--files", type=InputFile, nargs="+", required=True, metavar="FILE", help="what it is made of")
    options.add_stores_folder(parser)


def run(arguments: argparse.Namespace) -> int:
    from hierspec.stores.corpus_build import build_corpus

    tokenizer, vocabulary, home = options.load_home(arguments)
    with progress_bars() as progress:
        built = build_corpus(
            home.corpus, arguments.files, tokenizer.encode_batch, vocabulary, home.vocabulary_hash, progress=progress
        )
    note(f"{sum(shard.tokens for shard in built.shards):,} tokens in {home.corpus}")
    return 0
