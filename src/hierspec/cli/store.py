"""Build, look at and drop a model's token databases.

A corpus is a large text that guesses are looked up in; a history is what the model itself wrote. Both lie in the
model's own folder of the cache (or --stores), where the plans rest, hd and hd+ find them.

examples:
  hierspec store build corpus books/*.txt chats.jsonl
  hierspec store build history --prompts prompts.jsonl
  hierspec store info
  hierspec store drop history
  hierspec store replay answers.jsonl --use context,history
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.core.errors import HierspecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="make a corpus from files, or a history from the model's own answers")
    kinds = build.add_subparsers(dest="kind", metavar="corpus|history", required=True)
    corpus = kinds.add_parser("corpus", help="from .txt, .jsonl (also .gz) and .parquet files; goes on after a stop")
    corpus.add_argument("files", nargs="+", type=Path, metavar="FILE")
    history = kinds.add_parser("history", help="let the model answer prompts; goes on after a stop")
    history.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns")
    history.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")
    history.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of each answer (default 256)")
    history.add_argument("--batch", type=int, default=8, metavar="N", help="prompts side by side (default 8)")
    info = actions.add_parser("info", help="what there is, as JSON")
    drop = actions.add_parser("drop", help="remove a database")
    drop.add_argument("kind", choices=("corpus", "history"))
    drop.add_argument("--namespace", help="of the history: only what this namespace wrote")
    replay = actions.add_parser("replay", help="run recorded answers through stores, with no model: tokens per pass")
    replay.add_argument("record", type=Path, help="made by: hierspec bench --record FILE")
    replay.add_argument("--use", default="context", metavar="STORES", help="names, separated by commas, asked in turn")
    replay.add_argument("--budget", type=int, default=7, metavar="N", help="nodes of a proposal (default 7)")
    replay.add_argument("--first-only", action="store_true", help="the first store with a guess, not all merged")
    for action in (corpus, history, info, drop, replay):
        options.add_model_option(action)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "build":
        return _build_corpus(arguments) if arguments.kind == "corpus" else _build_history(arguments)
    return {"info": _info, "drop": _drop, "replay": _replay}[arguments.action](arguments)


def _build_corpus(arguments: argparse.Namespace) -> int:
    from hierspec.stores.corpus_build import build_corpus

    tokenizer, vocabulary, home = options.load_home(arguments)
    with progress_bars() as progress:
        built = build_corpus(
            home.corpus, arguments.files, tokenizer.encode_batch, vocabulary, home.vocabulary_hash, progress=progress
        )
    note(f"{sum(shard.tokens for shard in built.shards):,} tokens in {home.corpus}")
    return 0


def _build_history(arguments: argparse.Namespace) -> int:
    from hierspec.bench.prompts import read_prompts, spread
    from hierspec.own_answers import write_answers
    from hierspec.stores.history import HistoryStore

    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        prompts = spread(prompts, max(1, arguments.limit))
    model = options.load_model(arguments)
    with (
        HistoryStore(model.home.history, vocabulary_hash=model.home.vocabulary_hash) as store,
        progress_bars() as progress,
    ):
        conversations = [prompt.turns for prompt in prompts]
        written = write_answers(model, store, conversations, arguments.max_tokens, arguments.batch, progress)
        note(f"{written} answers added to {model.home.history}")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    _, _, home = options.load_home(arguments)
    found: dict[str, Any] = {"folder": str(home.folder), "history": None, "corpus": None}
    if home.history.exists():
        from hierspec.stores.history import HistoryStore

        with HistoryStore(home.history, vocabulary_hash=home.vocabulary_hash) as store:
            found["history"] = store.info()
    if home.corpus.exists():
        from hierspec.stores.corpus import CorpusStore

        found["corpus"] = CorpusStore(home.corpus, home.vocabulary_hash).info()
    print(json.dumps(found, indent=1, default=str))
    return 0


def _drop(arguments: argparse.Namespace) -> int:
    _, _, home = options.load_home(arguments)
    path = home.corpus if arguments.kind == "corpus" else home.history
    if not path.exists():
        raise HierspecError(f"There is no {arguments.kind} at {path}.")
    if arguments.kind == "corpus":
        shutil.rmtree(path)
    elif arguments.namespace is not None:
        from hierspec.stores.history import HistoryStore

        with HistoryStore(path, vocabulary_hash=home.vocabulary_hash) as store:
            store.drop(arguments.namespace)
    else:
        for file in path.parent.glob(path.stem + ".*"):  # with what SQLite and `build` keep beside it
            file.unlink()
    note(f"{arguments.kind} dropped")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from hierspec.core.hierarchy import Tier
    from hierspec.core.stats import Stats
    from hierspec.planner.replay import RecordedScorer, read_records, replay
    from hierspec.stores import open_store

    records = read_records(arguments.record)
    _, vocabulary, home = options.load_home(arguments)
    opened = [open_store(name, home, lasting=False) for name in arguments.use.split(",") if name]
    stores = tuple(store for store in opened if store is not None)
    tier = Tier(RecordedScorer(vocabulary), 1, stores, arguments.budget, not arguments.first_only)
    with progress_bars() as progress:
        found = replay(records, tier, vocabulary, progress)
    everything = Stats()
    for stats in found.values():
        everything.add(stats)
    print(
        json.dumps(
            {
                "tokens_per_pass": round(everything.tokens_per_pass, 3),
                "tasks": {task: round(stats.tokens_per_pass, 3) for task, stats in found.items()},
                "microseconds_per_guess": round(1e6 * everything.tiers[0].store_seconds / everything.passes, 1),
                "tiers": everything.to_json(),
            }
        )
    )
    return 0
