"""A record of `hierspec bench gpu` as a few tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hierspec.cli.report import Report


def show(document: Mapping[str, Any], report: Report) -> None:
    if limits := document.get("roofline"):
        report.line(
            f"copy {limits['copy_terabytes_per_second']:.2f} TB/s, product {limits['product_teraflops']:.0f} TFLOP/s"
        )
    _passes(document, report)
    for run in (*document["runs"], *document["batches"]):
        _plans(run, report)
    for row in document["engines"]:
        figure = row.get("error") or (
            f"{row['tokens_per_second']} tokens/s in batches of {row['batch']}"
            if "batch" in row
            else f"{row['token_ms']} ms a token after {row['context']} tokens"
        )
        report.line(f"{row['engine']}, {row['model']}: {figure}")
    for part in document["parts"]:
        if told := part.get("error") or part.get("left_out") or ("" if part.get("complete") else "cut off by the time"):
            report.line(f"{part['part']}: {told}")


def _passes(document: Mapping[str, Any], report: Report) -> None:
    rows = []
    widths = list(dict.fromkeys(width for result in document["passes"] for width in result.get("widths", {})))
    for result in document["passes"]:
        name = f"{result['shape']}, {result['format']}"
        if "refused" in result:
            report.line(f"{name}: {result['refused']}")
            continue
        bits = "same" if all(result["same_bits"].values()) else "NOT"
        for kind in ("kernels_ms", "pass_ms"):
            costs = [result["widths"].get(width, {}).get(kind) for width in widths]
            if any(cost is not None for cost in costs):
                written = ["" if cost is None else f"{cost:.3f}" for cost in costs]
                plain = result.get("plain", {}).get("tokens_per_second", "")
                rows.append((f"{name} {kind}", str(result["context"]), bits, *written, str(plain)))
    if rows:
        report.table("milliseconds of a pass by tokens", ("shape", "context", "bits", *widths, "plain/s"), rows)


def _plans(run: Mapping[str, Any], report: Report) -> None:
    title = (
        f"{run['model']}, temperature {run['temperature']:g}, {run['prompts_done']} of {run['prompts_total']} prompts"
    )
    rows = [
        (
            name,
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['speedup']:.2f}",
            "{:.2f} to {:.2f}".format(*figures["speedup_interval"]),
            str(figures.get("tokens_per_pass", "")),
            f"{figures['identical']}/{figures['prompts']}",
        )
        for name, figures in {**run["plans"], **run["peers"]}.items()
    ]
    report.table(title, ("plan", "tokens/s", "speed-up", "95%", "a pass", "identical"), rows)
    for what, reason in {**run.get("absent_plans", {}), **run.get("absent_engines", {}), **run["absent_peers"]}.items():
        report.line(f"{what} did not run: {reason}")
