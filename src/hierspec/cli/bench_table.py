"""What a terminal shows of the bench's documents: a table for each temperature, and of two documents side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hierspec.cli.console import command_line, note

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel


def about_model(model: LanguageModel) -> dict[str, Any]:
    backend = type(model.decoder).__name__
    return {
        "command": command_line(), "model": model.name, "dtype": model.dtype, "weights": model.weights,
        "decoder": backend, "products": model.decoder.products, "dtype_seconds": dict(model.dtype_choice.seconds),
    }  # fmt: skip


def show(result: Mapping[str, Any]) -> None:
    """The document for people, on stderr."""
    parts = [result, *result.get("other_temperatures", ())]
    for part in parts:
        if part["plans"]:
            _table(part, f"temperature {part.get('temperature', 0):g}" if len(parts) > 1 else "")
    for name, reason in result.get("absent_peers", {}).items():
        note(f"{name} did not run: {reason}")
    _beside_peers(result)
    for name, figures in [item for part in parts for item in (part["plans"] | part["peers"]).items()]:
        for found in figures.get("outliers", ()):
            note(
                f"{name}, prompt {found['prompt']} ({found['task']}): {found['tokens_per_second']} tokens/s where "
                f"{found['usual']} were usual; it counts all the same"
            )
    synthetic = [name for name, plan in result["plans"].items() if plan.get("synthetic")]
    if synthetic:
        note(f"synthetic acceptance: {', '.join(synthetic)}. The text is the model's, the speed is not.")
    if not result.get("complete", True):
        note(f"stopped: {result['prompts_done']} of {result['prompts_total']} prompts are done.")


def _beside_peers(result: Mapping[str, Any]) -> None:
    """Our fastest plan over the fastest peer, as the page has it."""
    from hierspec_bench.page.reading import Run

    run = Run.of(result)
    if run.best is not None and run.best_peer is not None and (ratio := run.best.over(run.best_peer)) is not None:
        sure = run.best.interval_over(run.best_peer)
        within = f" ({sure[0]:.2f} to {sure[1]:.2f})" if sure else ""
        note(f"{run.best.name} writes {ratio:.2f}x{within} the tokens/s of {run.best_peer.name}, the fastest peer.")


def _table(part: Mapping[str, Any], title: str) -> None:
    try:
        from rich.table import Table
    except ImportError:  # the JSON document says it all
        return
    table = Table(
        "plan", "identical", "speed-up", "95%", "tokens/s", "decode tokens/s", "tokens/pass",
        title=title or None, title_justify="left",
    )  # fmt: skip
    for name, plan in (part["plans"] | part["peers"]).items():
        low, high = plan["speedup_interval"]
        marked = name + (" (synthetic)" if plan.get("synthetic") else "")  # and once more below: cells are narrow
        table.add_row(
            marked, _same(plan), f"{plan['speedup']:.2f}x", f"{low:.2f} to {high:.2f}",
            f"{plan['tokens_per_second']:.1f}",
            f"{plan.get('decode_tokens_per_second', '')}", f"{plan.get('tokens_per_pass', '')}",
        )  # fmt: skip
    note(table)


def _same(plan: Mapping[str, Any]) -> str:
    if not plan.get("promises_text", True):
        return f"same distribution ({plan['rule']})" + (f", p {plan['law']['p']:g}" if "law" in plan else "")
    return f"{plan['identical']} of {plan['prompts']}" + (f", {plan['ties']} ties" if plan["ties"] else "")


def show_comparison(compared: Mapping[str, Any]) -> None:
    """Speed-ups of two runs, over all prompts and by task."""
    try:
        from rich.table import Table
    except ImportError:
        return
    if compared["other_settings"]:
        note(f"The two runs differ in {', '.join(compared['other_settings'])}.")
    for which in compared["incomplete"]:
        note(f"The run {which} was stopped before its end: finish it, then compare.")
    table = Table("", "before", "after", "change", "beyond chance", "identical", "tokens/s")
    for row in compared["rows"]:
        rates = f"{row['rates'][0]:.1f}, {row['rates'][1]:.1f}"
        table.add_row(row["name"], *_changed(row), rates, end_section=not row["tasks"])
        for number, (task, change) in enumerate(row["tasks"].items(), 1):
            table.add_row(f"  {task}", *_changed(change), "", end_section=number == len(row["tasks"]))
    note(table)
    for which in ("before", "after"):
        if compared[f"only_{which}"]:
            note(f"only {which}: {', '.join(compared[f'only_{which}'])}")
    if compared["farthest_apart"] is not None:
        far = compared["farthest_apart"]
        note(f"The ratios of the two runs are at most {far['percent']}% apart ({far['name']}).")
    for name in compared["lost_equality"]:
        note(f"{name} writes other text than plain where it did not before.")
    for name in compared["slower"]:
        note(f"{name} is slower, by more than {100 * compared['tolerance']:g}% and than chance explains.")


def _changed(row: Mapping[str, Any]) -> list[str]:
    ends = []
    for speedup, interval in zip(row["speedups"], row["intervals"], strict=True):
        ends.append(f"{speedup:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""))
    beyond = "" if row["outside"] is None else ("yes" if row["outside"] else "no")
    before, after = row["identical"]
    return [*ends, f"{100 * (row['change'] - 1):+.1f}%", beyond, after if before == after else f"{before}, now {after}"]
