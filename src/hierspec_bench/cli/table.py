"""What a terminal shows of bench records: a table for each temperature, and two records side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hierspec.cli.console import note
from hierspec_bench.record import PEER, Entry, Record, Setting


def show(record: Record) -> None:
    """The record for people, on stderr."""
    several = len(record.settings) > 1
    for setting in record.settings:
        if any(entry.kind != PEER for entry in setting.entries):
            _table(setting, f"temperature {setting.temperature or 0:g}" if several else "")
    for name, reason in record.absent.items():
        note(f"{name} did not run: {reason}")
    _beside_peers(record)
    for setting in record.settings:
        for entry in setting.entries:
            if not entry.promises_text:
                note(f"{entry.name}: the rule {entry.rule} promises the same distribution, not the same text.")
            for outlier in entry.outliers or ():
                note(
                    f"{entry.name}, prompt {outlier.prompt} ({outlier.task}): {outlier.tokens_per_second} tokens/s "
                    f"where {outlier.usual} were usual; it counts all the same"
                )
    synthetic = [entry.name for entry in record.main.entries if entry.synthetic]
    if synthetic:
        note(f"synthetic acceptance: {', '.join(synthetic)}. The text is the model's, the speed is not.")
    if not record.complete:
        done, total = (record.document.get(key) for key in ("prompts_done", "prompts_total"))
        note(f"stopped: {done} of {total} prompts are done.")


def _beside_peers(record: Record) -> None:
    """Our fastest plan over the fastest other engine, as the page has it."""
    best, peer = record.best, record.best_peer
    if best is None or peer is None or (ratio := best.over(peer)) is None:
        return
    interval = best.interval_over(peer)
    within = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    note(f"{best.name} writes {ratio:.2f}x{within} the tokens/s of {peer.name}, the fastest other engine.")


def _table(setting: Setting, title: str) -> None:
    try:
        from rich.table import Table
    except ImportError:  # the JSON document says it all
        return
    heads = ("plan", "identical", "speed-up", "95%", "tokens/s", "decode tokens/s", "tokens/pass")
    table = Table(*heads, title=title or None, title_justify="left")
    for entry in setting.entries:
        figures, interval = entry.figures, entry.figures.speedup_interval
        table.add_row(
            entry.name + (" (synthetic)" if entry.synthetic else ""),  # and once more below: cells are narrow
            _same(entry),
            f"{figures.speedup or 0.0:.2f}x",
            f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "",
            f"{figures.tokens_per_second or 0.0:.1f}",
            _optional(figures.decode_tokens_per_second),
            _optional(figures.tokens_per_pass),
        )
    note(table)


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _same(entry: Entry) -> str:
    if not entry.promises_text:
        return "" if entry.distribution.p is None else f"p {entry.distribution.p:g}"
    figures = entry.figures
    return f"{figures.identical} of {figures.prompts}" + (f", {figures.ties} ties" if figures.ties else "")


def show_comparison(comparison: Mapping[str, Any]) -> None:
    """Speed-ups of two runs, over all prompts and by task."""
    try:
        from rich.table import Table
    except ImportError:
        return
    if comparison["other_settings"]:
        note(f"The two runs differ in {', '.join(comparison['other_settings'])}.")
    for which in comparison["incomplete"]:
        note(f"The run {which} was stopped before its end: finish it, then compare.")
    table = Table("", "before", "after", "change", "beyond noise", "identical", "tokens/s")
    for row in comparison["rows"]:
        rates = f"{row['rates'][0]:.1f}, {row['rates'][1]:.1f}"
        table.add_row(row["name"], *_changed(row), rates, end_section=not row["tasks"])
        for number, (task, change) in enumerate(row["tasks"].items(), 1):
            table.add_row(f"  {task}", *_changed(change), "", end_section=number == len(row["tasks"]))
    note(table)
    for which in ("before", "after"):
        if comparison[f"only_{which}"]:
            note(f"only {which}: {', '.join(comparison[f'only_{which}'])}")
    if comparison["farthest_apart"] is not None:
        far = comparison["farthest_apart"]
        note(f"The ratios of the two runs are at most {far['percent']}% apart ({far['name']}).")
    for name in comparison["lost_equality"]:
        note(f"{name} writes other text than plain where it did not before.")
    for name in comparison["slower"]:
        note(f"{name} is slower, by more than {100 * comparison['tolerance']:g}% and than noise explains.")


def _changed(row: Mapping[str, Any]) -> list[str]:
    ends = []
    for speedup, interval in zip(row["speedups"], row["intervals"], strict=True):
        ends.append(f"{speedup:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""))
    beyond = "" if row["outside"] is None else ("yes" if row["outside"] else "no")
    before, after = row["identical"]
    return [*ends, f"{100 * (row['change'] - 1):+.1f}%", beyond, after if before == after else f"{before}, now {after}"]
