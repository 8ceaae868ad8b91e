"""Build, look at and drop a model's token databases.

A corpus is a large text that drafts are looked up in; a history is what the model itself wrote, and frequent are the
n-grams that most of that has. All are in the model's folder of the cache (or --stores), where the plans rest, hd and
hd+ find them. MODEL stands right after the command.

examples:
  hierspec store build corpus --files books/*.txt chats.jsonl
  hierspec store build history ./my-model --prompts prompts.jsonl
  hierspec store build frequent ./my-model
  hierspec store info
  hierspec store drop history
  hierspec store replay answers.jsonl --use context,history
  hierspec store replay answers.jsonl --ablation context,history,corpus --costs passes.json
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli import options, store_build_corpus, store_build_frequent, store_build_history, store_replay
from hierspec.cli.console import note
from hierspec.cli.parser import add_command, add_commands, text
from hierspec.cli.report import Report
from hierspec.core.errors import HierspecError

if TYPE_CHECKING:
    from hierspec.stores import Home

_KINDS = ("corpus", "history", "frequent")
_INFO = """Show which databases a model has, and how large they are.

examples:
  hierspec store info
  hierspec store info ./my-model --json
"""
_DROP = """Remove a database of a model.

examples:
  hierspec store drop {kind}
  hierspec store drop {kind} ./my-model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_commands(parser, "action", "ACTION")
    help_text = "make a corpus from files, a history from the model's own answers, or its frequent n-grams"
    build = actions.add_parser("build", help=help_text, description=f"{help_text.capitalize()}.\n{_BUILD_EXAMPLES}")
    kinds = add_commands(build, "kind", "|".join(_KINDS))
    help_text = "from .txt, .jsonl (also .gz) and .parquet files; a stopped build resumes"
    add_command(kinds, "corpus", help_text, store_build_corpus)
    add_command(kinds, "history", "let the model answer prompts; a stopped build resumes", store_build_history)
    add_command(kinds, "frequent", "the n-grams that most of a history's answers have", store_build_frequent)
    info = actions.add_parser("info", help="what there is", description=_INFO)
    options.add_source(info)
    options.add_stores_folder(info)
    options.add_json(info)
    info.set_defaults(run=_info)
    drop = actions.add_parser("drop", help="remove a database", description=_DROP.format(kind="history"))
    kinds = add_commands(drop, "kind", "|".join(_KINDS))
    for kind, drop_it in zip(_KINDS, (_drop_corpus, _drop_history, _drop_frequent), strict=True):
        what = "frequent n-grams" if kind == "frequent" else kind
        dropped = kinds.add_parser(kind, help=f"remove the {what}", description=_DROP.format(kind=kind))
        options.add_source(dropped)
        options.add_stores_folder(dropped)
        dropped.set_defaults(run=drop_it)
        if kind == "history":
            dropped.add_argument("--namespace", type=text, metavar="NAME", help="only what this namespace wrote")
    help_text = "run recorded answers through stores, with no model: tokens per pass"
    add_command(actions, "replay", help_text, store_replay)


_BUILD_EXAMPLES = """
examples:
  hierspec store build corpus --files books/*.txt chats.jsonl
  hierspec store build history --prompts prompts.jsonl
  hierspec store build frequent
"""


def run(arguments: argparse.Namespace) -> int:
    raise AssertionError("one of its commands was chosen")


def _info(arguments: argparse.Namespace) -> int:
    _, _, home = options.load_home(arguments)
    info: dict[str, Any] = {"folder": str(home.folder), "history": None, "frequent": None, "corpus": None}
    if home.has_history():
        with home.open_history() as store:
            info["history"] = store.info()
    if home.frequent.exists():
        from hierspec.stores.frequent import FrequentStore

        info["frequent"] = FrequentStore(home.frequent, home.vocabulary_hash).info()
    if home.corpus.exists():
        from hierspec.stores.corpus import CorpusStore

        info["corpus"] = CorpusStore(home.corpus, home.vocabulary_hash).info()
    report = Report.of(arguments)
    report.line(f"in {home.folder}")
    for kind in ("history", "frequent", "corpus"):
        about = info[kind]
        if about is None:
            report.line(f"{kind}: none")
        else:
            report.line(f"{kind}:")
            for key, value in about.items():
                report.line(f"  {key}: {_shown(value)}")
    report.document({**info})
    return 0


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _home_of(kind: str, arguments: argparse.Namespace) -> Home:
    _, _, home = options.load_home(arguments)
    path = {"corpus": home.corpus, "history": home.history, "frequent": home.frequent}[kind]
    if not (home.has_history() if kind == "history" else path.exists()):
        raise HierspecError(f"There is no {kind} at {path}.")
    return home


def _drop_corpus(arguments: argparse.Namespace) -> int:
    shutil.rmtree(_home_of("corpus", arguments).corpus)
    note("corpus dropped")
    return 0


def _drop_frequent(arguments: argparse.Namespace) -> int:
    _home_of("frequent", arguments).frequent.unlink()
    note("frequent n-grams dropped")
    return 0


def _drop_history(arguments: argparse.Namespace) -> int:
    home = _home_of("history", arguments)
    if arguments.namespace is not None or home.history_url:
        with home.open_history() as store:
            store.drop(arguments.namespace)
    else:
        beside = [Path(f"{home.history}{suffix}") for suffix in ("", "-wal", "-shm")]  # by SQLite
        for file in (*beside, home.history.with_suffix(".done.json")):  # the last by `build`
            file.unlink(missing_ok=True)
        home.frequent.unlink(missing_ok=True)  # it was made from the history
    note("history dropped")
    return 0
