"""`hierspec plan --simulate`: a hierarchy for machines and models that you do not have. No model is loaded."""

from __future__ import annotations

import argparse
from typing import Any

from hierspec.cli.console import progress_bars
from hierspec.cli.report import Report, command_line

_SHOWN = 8  # hierarchies in the table
_SIMULATED = 3  # of them checked by Monte Carlo


def run(arguments: argparse.Namespace) -> int:
    from hierspec.paths import whole_file
    from hierspec.planner.formula import whatif
    from hierspec.planner.formula.figures import in_words
    from hierspec.planner.formula.monte_carlo import monte_carlo
    from hierspec.planner.formula.picture import picture
    from hierspec.planner.formula.report import compared, explained, tier_rows
    from hierspec.planner.formula.search import search

    asked = whatif.read(arguments.simulate)
    figures = asked.figures
    with progress_bars() as progress:
        progress("Searching hierarchies", 0, 1)
        hierarchies = search(figures, asked.limits)
        progress("Searching hierarchies", 1, 1)
        progress("Monte Carlo check", 0, 1)
        chosen = [scored.hierarchy for scored in hierarchies[:_SIMULATED]] + list(asked.hierarchies.values())
        checked = {hierarchy: monte_carlo(figures, hierarchy) for hierarchy in chosen}
        listed = compared(figures, hierarchies, asked.hierarchies, checked)
        reasons = explained(figures, hierarchies, asked.limits, progress) if arguments.explain else []
    best = hierarchies[0].score
    rows = tier_rows(figures, best)
    if arguments.output is not None:
        with whole_file(arguments.output) as temporary:
            temporary.write_text(picture(figures, best, asked.title), encoding="utf-8")
    report = Report.of(arguments)
    if asked.title:
        report.line(asked.title)
    report.table(
        f"The best hierarchy: {in_words(best.hierarchy)}",
        ("tier", "ms/pass", "rows", "accepted\nabove", "block", "time", "predicted\nms/token"),
        [
            (
                row["tier"] + (f" + {row['store']}" if row["store"] else ""),
                f"{row['pass_ms']:.3g}",
                f"{row['rows']:.1f}",
                "" if row["stands"] is None else f"{100 * row['stands']:.0f}%",
                f"{row['gathered']:.2f}",
                f"{100 * row['share']:.0f}%",
                f"{row['token_ms']:.3g}",
            )
            for row in rows
        ],
    )
    report.line("")
    named = [row for row in listed[_SHOWN:] if row.name or len(row.score.hierarchy) == 1]
    report.table(
        "Hierarchies, the fastest first",
        ("hierarchy", "ms/token", "over\nplain", "tokens\n/pass", "Monte Carlo"),
        [
            (
                (f"{hierarchy.name}: " if hierarchy.name else "") + in_words(hierarchy.score.hierarchy),
                f"{1e3 * hierarchy.score.seconds:.3g}",
                f"{hierarchy.speedup:.2f}x",
                f"{hierarchy.score.tokens_per_pass:.2f}",
                ""
                if hierarchy.monte_carlo is None
                else f"{1e3 * hierarchy.monte_carlo.seconds:.3g} ± {1e3 * hierarchy.monte_carlo.error:.1g}",
            )
            for hierarchy in listed[:_SHOWN] + named
        ],
    )
    for reason in reasons:
        report.line(reason)
    document: dict[str, Any] = {
        "command": command_line(),
        "title": asked.title,
        "plain_ms": round(1e3 * figures.target.seconds(1), 4),
        "best": in_words(best.hierarchy),
        "tiers": rows,
        "hierarchies": [row.to_json() for row in listed],
    }
    report.document(document | ({"explained": reasons} if reasons else {}), arguments.results)
    return 0
