"""Build, look at and drop a model's token databases.

A corpus is a large text that drafts are looked up in; a history is what the model itself wrote. Both are in the model's
folder of the cache (or --stores), where the plans rest, hd and hd+ find them.

examples:
  hierspec store build corpus books/*.txt chats.jsonl
  hierspec store build history --prompts prompts.jsonl
  hierspec store info
  hierspec store drop history
  hierspec store replay answers.jsonl --use context,history
  hierspec store replay answers.jsonl --ablation context,history,corpus --costs passes.json
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from hierspec.cli import options
from hierspec.cli.console import command_line, hand_out, note, progress_bars
from hierspec.core.errors import HierspecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="make a corpus from files, or a history from the model's own answers")
    kinds = build.add_subparsers(dest="kind", metavar="corpus|history", required=True)
    corpus = kinds.add_parser("corpus", help="from .txt, .jsonl (also .gz) and .parquet files; a stopped build resumes")
    corpus.add_argument("files", nargs="+", type=Path, metavar="FILE")
    history = kinds.add_parser("history", help="let the model answer prompts; a stopped build resumes")
    history.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns")
    history.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")
    history.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of each answer (default 256)")
    history.add_argument("--batch", type=int, default=8, metavar="N", help="prompts at once (default 8)")
    info = actions.add_parser("info", help="what there is, as JSON")
    drop = actions.add_parser("drop", help="remove a database")
    drop.add_argument("kind", choices=("corpus", "history"))
    drop.add_argument("--namespace", help="of the history: only what this namespace wrote")
    replay = actions.add_parser("replay", help="run recorded answers through stores, with no model: tokens per pass")
    replay.add_argument("record", type=Path, help="made by: hierspec bench run --record FILE")
    replay.add_argument("--use", default="context", metavar="STORES", help="names, separated by commas, asked in turn")
    replay.add_argument(
        "--ablation",
        nargs="?",
        const="context,history,corpus?",
        metavar="STORES",
        help="each of these alone, every pair, and all (default: context, history and, where there is one, corpus)",
    )
    replay.add_argument("--budget", type=int, default=7, metavar="N", help="nodes of a proposal (default 7)")
    replay.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="made by bench passes --output FILE: verify only what is worth its time, and predict the speed-up",
    )
    replay.add_argument("--output", type=Path, metavar="FILE", help="write the JSON document to a file too")
    replay.add_argument("--first-only", action="store_true", help="the first store with a proposal, not all merged")
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
    from hierspec.fill_history import fill_history
    from hierspec.prompts import read_prompts, spread
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
        written = fill_history(model, store, conversations, arguments.max_tokens, arguments.batch, progress)
        note(f"{written} answers added to {model.home.history}")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    _, _, home = options.load_home(arguments)
    info: dict[str, Any] = {"folder": str(home.folder), "history": None, "corpus": None}
    if home.history.exists():
        from hierspec.stores.history import HistoryStore

        with HistoryStore(home.history, vocabulary_hash=home.vocabulary_hash) as store:
            info["history"] = store.info()
    if home.corpus.exists():
        from hierspec.stores.corpus import CorpusStore

        info["corpus"] = CorpusStore(home.corpus, home.vocabulary_hash).info()
    print(json.dumps(info, indent=1, default=str))
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
    from hierspec.assembly.measured_costs import read_costs
    from hierspec.planner.simulation.ablation import ablation, answered_before, distinct, replay_with
    from hierspec.planner.simulation.replay import read_records
    from hierspec.stores import open_store
    from hierspec.stores.history import SHARED, HistoryStore

    if arguments.ablation is not None and arguments.first_only:
        raise HierspecError("An ablation merges what all stores propose; leave out --first-only.")
    recorded = read_records(arguments.record)
    records = distinct(recorded)
    costs = None if arguments.costs is None else read_costs(arguments.costs)
    _, vocabulary, home = options.load_home(arguments)
    about: dict[str, Any] = {
        "command": command_line(),
        "records": len(records),
        "repeats_left_out": len(recorded) - len(records),
        "budget": arguments.budget,
        "adapt": costs is not None,
        "stores": home.beginning(),
        "answers_known_before": 0,
    }
    if home.history.exists():
        with HistoryStore(home.history, vocabulary_hash=home.vocabulary_hash) as built:
            about["answers_known_before"] = answered_before(records, built.documents(SHARED))
    if about["answers_known_before"]:
        note(f"The history was built on {about['answers_known_before']} of these prompts: it knows their answers.")

    names = [name for name in (arguments.ablation or arguments.use).split(",") if name]
    with progress_bars() as progress:
        if arguments.ablation is None:
            opened = [open_store(name, home, lasting=False) for name in names]
            stores = [store for store in opened if store is not None]
            merge = not arguments.first_only
            replays = [replay_with(records, stores, arguments.budget, vocabulary, merge, costs, progress)]
        else:
            replays = ablation(
                records,
                names,
                lambda name: open_store(name, home, lasting=False),
                arguments.budget,
                vocabulary,
                costs,
                progress,
            )
    if arguments.ablation is None:
        hand_out(about | replays[0].figures() | {"tiers": replays[0].everything().to_json()}, arguments.output)
        return 0
    combinations = {" + ".join(replay.stores): replay.figures() for replay in replays}
    _table(combinations)
    hand_out(about | {"combinations": combinations}, arguments.output)
    return 0


def _table(combinations: dict[str, dict[str, Any]]) -> None:
    try:
        from rich.table import Table
    except ImportError:  # the JSON document says it all
        return
    table = Table("stores", "tokens/pass", "nodes/pass", "us drafting/pass", "predicted speed-up")
    for name, figures in combinations.items():
        predicted = f"{figures['predicted_speedup']:.2f}x" if "predicted_speedup" in figures else ""
        table.add_row(
            name,
            f"{figures['tokens_per_pass']:.2f}",
            f"{figures['nodes_per_pass']:.1f}",
            f"{figures['drafting_us_per_pass']:.0f}",
            predicted,
        )
    note(table)
