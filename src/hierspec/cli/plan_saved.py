"""`hierspec plan --show` and `--forget`: the plan that `auto` means for a model on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from hierspec.cli import options
from hierspec.cli.auto import SAVED, plan_in_words, source_of_auto
from hierspec.cli.report import Report


def run(arguments: argparse.Namespace) -> int:
    model = options.load_model(arguments)
    from hierspec.assembly.auto import forget_plan, saved_plan_file

    report = Report.of(arguments)
    document: dict[str, Any] = {"model": model.name}
    if arguments.forget:
        document["forgotten"] = forget_plan(model.about)
        report.line("The saved plan is forgotten." if document["forgotten"] else "There was no saved plan to forget.")
    plan = model.plan("auto")
    for line in plan_in_words(model, "auto", plan):
        report.line(line)
    document["auto"] = source_of_auto(model)
    if document["auto"] == SAVED:
        document["file"] = str(saved_plan_file(model.about))
        report.line(f"It is in {document['file']}.")
    report.document({**document, "plan": plan.to_toml()}, arguments.results)
    return 0
