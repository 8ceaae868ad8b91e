"""Plan a hierarchy: which tiers to stack, and how many tokens each gathers.

--simulate plans for machines and models that one does not have, from what passes cost and how often tokens stand
(docs/planning.md has the file's keys). Nothing is measured and no model is loaded.

examples:
  hierspec plan --simulate examples/whatif_hispec.toml --explain
  hierspec plan --simulate costs.toml --output hierarchy.svg
  hierspec plan --simulate costs.toml --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hierspec.cli.console import command_line, progress_bars
from hierspec.core.errors import HierspecError

_SHOWN = 8  # hierarchies in the table
_PLAYED = 3  # of them with coins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulate", type=Path, metavar="FILE", help="plan from the figures of a TOML file")
    parser.add_argument(
        "--explain", action="store_true", help="say why each tier is in or out: what changing that would cost"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw the best hierarchy, as SVG")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def run(arguments: argparse.Namespace) -> int:
    if arguments.simulate is None:
        raise HierspecError("There is nothing to plan from; give a file of costs and acceptances with --simulate.")
    from hierspec.paths import whole_file
    from hierspec.planner import whatif
    from hierspec.planner.figures import in_words
    from hierspec.planner.picture import picture
    from hierspec.planner.report import compared, explained, tier_rows
    from hierspec.planner.search import search
    from hierspec.planner.simulate import play

    asked = whatif.read(arguments.simulate)
    figures = asked.figures
    with progress_bars() as progress:
        found = search(figures, asked.limits)
        progress("Playing with coins", 0, 1)
        chosen = [one.ladder for one in found[:_PLAYED]] + list(asked.ladders.values())
        listed = compared(figures, found, asked.ladders, {ladder: play(figures, ladder) for ladder in chosen})
        reasons = explained(figures, found, asked.limits, progress) if arguments.explain else []
    best = found[0].score
    rows = tier_rows(figures, best)
    if arguments.output is not None:
        with whole_file(arguments.output) as temporary:
            temporary.write_text(picture(figures, best, asked.title), encoding="utf-8")
    if arguments.json:
        document: dict[str, Any] = {
            "command": command_line(), "title": asked.title, "plain_ms": round(1e3 * figures.target.seconds(1), 4),
            "best": in_words(best.ladder), "tiers": rows, "hierarchies": [one.to_json() for one in listed],
        }  # fmt: skip
        print(json.dumps(document | ({"explained": reasons} if reasons else {}), ensure_ascii=False))
        return 0
    if asked.title:
        print(asked.title)
    _show(
        f"The best hierarchy: {in_words(best.ladder)}",
        ("tier", "ms/pass", "rows", "stand above", "gathered", "time", "predicted ms/token"),
        [
            (
                row["tier"] + (f" + {row['store']}" if row["store"] else ""),
                f"{row['pass_ms']:.3g}", f"{row['rows']:.1f}",
                "" if row["stands"] is None else f"{100 * row['stands']:.0f}%",
                f"{row['gathered']:.2f}", f"{100 * row['share']:.0f}%", f"{row['token_ms']:.3g}",
            )
            for row in rows
        ],
    )  # fmt: skip
    named = [one for one in listed[_SHOWN:] if one.name or len(one.score.ladder) == 1]
    _show(
        "Hierarchies, the fastest first",
        ("hierarchy", "ms/token", "over plain", "tokens/pass", "with coins"),
        [
            (
                (f"{one.name}: " if one.name else "") + in_words(one.score.ladder),
                f"{1e3 * one.score.seconds:.3g}", f"{one.speedup:.2f}x", f"{one.score.tokens_per_pass:.2f}",
                "" if one.played is None else f"{1e3 * one.played.seconds:.3g} ± {1e3 * one.played.error:.1g}",
            )
            for one in listed[:_SHOWN] + named
        ],
    )  # fmt: skip
    for reason in reasons:
        print(reason)
    return 0


def _show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output; without rich as lines."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for row in (columns, *rows):
            print("  ".join(row))
        return
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
