"""What a terminal shows of bench records: a table for each temperature, and two records side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hierspec.cli.report import Report
from hierspec_bench.record import PEER, Entry, Record, Setting


def show(record: Record, report: Report | None = None) -> None:
    """Prints the record for people."""
    report = report or Report()
    several = len(record.settings) > 1
    for setting in record.settings:
        if any(entry.kind != PEER for entry in setting.entries):
            _table(report, setting, f"temperature {setting.temperature or 0:g}" if several else "")
    for name, reason in record.absent.items():
        report.line(f"{name} did not run: {reason}")
    _beside_peers(report, record)
    for setting in record.settings:
        for entry in setting.entries:
            if not entry.promises_text:
                report.line(f"{entry.name}: the rule {entry.rule} promises the same distribution, not the same text.")
            for outlier in entry.outliers or ():
                report.line(
                    f"{entry.name}, prompt {outlier.prompt} ({outlier.task}): {outlier.tokens_per_second} tokens/s "
                    f"where {outlier.usual} were usual; it counts all the same"
                )
    synthetic = [entry.name for entry in record.main.entries if entry.synthetic]
    if synthetic:
        report.line(f"synthetic acceptance: {', '.join(synthetic)}. The text is the model's, the speed is not.")
    if not record.complete:
        done, total = (record.document.get(key) for key in ("prompts_done", "prompts_total"))
        report.line(f"stopped: {done} of {total} prompts are done.")


def _beside_peers(report: Report, record: Record) -> None:
    """Our fastest plan relative to the fastest other engine, as on the page."""
    best, peer = record.best, record.best_peer
    if best is None or peer is None or (ratio := best.over(peer)) is None:
        return
    interval = best.interval_over(peer)
    within = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    report.line(f"{best.name} writes {ratio:.2f}x{within} the tokens/s of {peer.name}, the fastest other engine.")


def _table(report: Report, setting: Setting, title: str) -> None:
    rows = []
    for entry in setting.entries:
        figures, interval = entry.figures, entry.figures.speedup_interval
        rows.append(
            (
                entry.name + (" (synthetic)" if entry.synthetic else ""),
                _same(entry),
                f"{figures.speedup or 0.0:.2f}x",
                f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "",
                f"{figures.tokens_per_second or 0.0:.1f}",
                _optional(figures.decode_tokens_per_second),
                _optional(figures.tokens_per_pass),
            )
        )
    heads = ("plan", "identical", "speed-up", "95%", "tokens\n/s", "decode\ntokens/s", "tokens\n/pass")
    report.table(title, heads, rows)


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _same(entry: Entry) -> str:
    if not entry.promises_text:
        return "" if entry.distribution.p is None else f"p {entry.distribution.p:g}"
    figures = entry.figures
    return f"{figures.identical} of {figures.prompts}" + (f", {figures.ties} ties" if figures.ties else "")


def show_comparison(comparison: Mapping[str, Any], report: Report) -> None:
    """Speed-ups of two runs, over all prompts and by task."""
    if comparison["other_settings"]:
        report.line(f"The two runs differ in {', '.join(comparison['other_settings'])}.")
    for which in comparison["incomplete"]:
        report.line(f"The run {which} was stopped before its end: finish it, then compare.")
    rows = []
    for row in comparison["rows"]:
        rows.append((row["name"], *_changed(row)))
        rows += [(f"  {task}", *_changed(change)) for task, change in row["tasks"].items()]
    heads = ("", "before", "95%", "after", "95%", "change", "beyond\nnoise", "identical")
    report.table("", heads, rows)
    for row in comparison["rows"]:
        report.line(f"{row['name']}: {row['rates'][0]:.1f} tokens/s before, {row['rates'][1]:.1f} after")
    for which in ("before", "after"):
        if comparison[f"only_{which}"]:
            report.line(f"only {which}: {', '.join(comparison[f'only_{which}'])}")
    if comparison["farthest_apart"] is not None:
        far = comparison["farthest_apart"]
        report.line(f"The ratios of the two runs are at most {far['percent']}% apart ({far['name']}).")
    for name in comparison["lost_equality"]:
        report.line(f"{name} writes other text than plain where it did not before.")
    for name in comparison["slower"]:
        report.line(f"{name} is slower, by more than {100 * comparison['tolerance']:g}% and than noise explains.")


def _changed(row: Mapping[str, Any]) -> list[str]:
    cells = []
    for speedup, interval in zip(row["speedups"], row["intervals"], strict=True):
        cells += [f"{speedup:.2f}x", f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else ""]
    beyond = "" if row["outside"] is None else ("yes" if row["outside"] else "no")
    before, after = row["identical"]
    same = after if before == after else f"{before}, {after}"
    return [*cells, f"{100 * (row['change'] - 1):+.1f}%", beyond, same]
