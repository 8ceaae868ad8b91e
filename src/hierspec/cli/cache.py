"""List what the cache holds and how much of the disk it takes, and delete from it.

Everything in it can be made again, which takes time, except for histories and corpora: those go only when --kind names
them. What a running process uses stays. Without --yes, prune only shows what would go.

examples:
  hierspec cache
  hierspec cache prune --keep-size 5G
  hierspec cache prune --kind packed --kind converted --older-than 30d --yes
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from typing import Any

from hierspec.cache import KINDS, CacheEntry, entries, prune
from hierspec.cli import options
from hierspec.cli.parser import completes
from hierspec.cli.report import Report
from hierspec.cli.status import USER_ERROR
from hierspec.core.errors import HierspecError
from hierspec.paths import cache_folder
from hierspec.sizes import parse_size, written_size

_SECONDS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_PRUNE = """Delete from the cache, the least recently used first. Without --yes: only show what would go.

examples:
  hierspec cache prune --keep-size 5G
  hierspec cache prune --kind packed --kind converted --older-than 30d --yes
  hierspec cache prune --model "SmolLM2*" --yes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_json(parser)
    actions = parser.add_subparsers(dest="action", metavar="prune")
    pruning = actions.add_parser("prune", help="delete from it", description=_PRUNE)
    kind = pruning.add_argument(
        "--kind",
        action="append",
        metavar="KIND",
        help=f"only this kind (repeatable): {', '.join(KINDS)}; default: all but histories, corpora and other",
    )
    completes(kind, KINDS)
    pruning.add_argument("--model", metavar="NAME", help="only what belongs to this model; may be a pattern")
    pruning.add_argument("--older-than", metavar="AGE", help="only what was last used so long ago: 12h, 30d, 8w")
    pruning.add_argument("--keep-size", metavar="SIZE", help="only until what is left takes at most this, such as 5G")
    pruning.add_argument("--yes", action="store_true", help="delete it")
    options.add_json(pruning)
    pruning.set_defaults(run=_prune)


def run(arguments: argparse.Namespace) -> int:
    listed = entries()
    report = Report.of(arguments)
    total = sum(entry.bytes for entry in listed)
    report.line(f"{cache_folder()} and compiled code: {written_size(total)}")
    _show(report, listed)
    report.document({"folder": str(cache_folder()), "bytes": total, "entries": [_document(entry) for entry in listed]})
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    older_than = None if arguments.older_than is None else _seconds(arguments.older_than)
    keep = None if arguments.keep_size is None else parse_size(arguments.keep_size)
    pruned = prune(arguments.kind, arguments.model, older_than, keep, dry_run=not arguments.yes)
    report = Report.of(arguments)
    _show(report, pruned.deleted)
    for entry in pruned.in_use:
        report.line(f"{entry.path} stays: a running process uses it.")
    for entry in pruned.failed:
        report.line(f"{entry.path} could not be deleted; look at its permissions.")
    size = written_size(pruned.bytes)
    report.line(f"{size} deleted." if arguments.yes else f"{size} would be deleted; --yes deletes it.")
    document: dict[str, Any] = {"deleted": arguments.yes, "bytes": pruned.bytes}
    document["entries"] = [_document(entry) for entry in pruned.deleted]
    document |= {"in_use": [str(entry.path) for entry in pruned.in_use]}
    report.document(document | {"failed": [str(entry.path) for entry in pruned.failed]})
    return USER_ERROR if pruned.failed else 0


def _show(report: Report, listed: Sequence[CacheEntry]) -> None:
    """A row for each kind and model."""
    groups: dict[tuple[str, str], list[CacheEntry]] = {}
    for entry in listed:
        groups.setdefault((entry.kind, entry.model), []).append(entry)
    if not groups:
        return
    report.table(
        "",
        ("model, or what it is", "kind", "files", "size", "last used"),
        [
            (
                model or KINDS[kind],
                kind,
                str(len(group)),
                written_size(sum(entry.bytes for entry in group)),
                "now" if any(entry.in_use for entry in group) else _ago(max(entry.last_used for entry in group)),
            )
            for (kind, model), group in groups.items()
        ],
    )


def _document(entry: CacheEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "model": entry.model,
        "path": str(entry.path),
        "bytes": entry.bytes,
        "last_used": round(entry.last_used, 1),
        "in_use": entry.in_use,
    }


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([hdw])", age.strip().lower(), re.ASCII)
    if not match:
        raise HierspecError(f"{age[:40]!r} is not an age; write it like 12h, 30d or 8w.")
    return float(match[1]) * _SECONDS[match[2]]


def _ago(last_used: float) -> str:
    hours = max(0.0, time.time() - last_used) / 3600
    if hours < 2:
        return f"{60 * hours:.0f} min ago"
    return f"{hours:.0f} h ago" if hours < 48 else f"{hours / 24:.0f} days ago"
