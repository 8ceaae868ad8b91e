"""`hierspec bench --phases`: text and load that change on the way."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hierspec.cli import options
from hierspec.cli.console import command_line, hand_out, note, progress_bars

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompts import BenchPrompt
    from hierspec_bench.phases import Phase


def run_phases(arguments: argparse.Namespace, model: LanguageModel, prompts: list[BenchPrompt]) -> int:
    """`auto` and every plan of --plans go through the same phases; 1 where a text is not plain decoding's."""
    import torch

    from hierspec.machine import machine
    from hierspec_bench.phases import CONVERSATIONS, PhaseRun, shifting_load, shifting_text

    [sampling] = options.chosen_samplings(arguments)
    sampling = replace(sampling, seed=sampling.seed or 0)
    plans = {name: model.plan(name) for name in arguments.plans.split(",") if name}
    limit = arguments.limit or len(CONVERSATIONS)
    with progress_bars() as progress:
        run = PhaseRun(model, plans, sampling)
        text = shifting_text(run, CONVERSATIONS[:limit], progress)
        load = shifting_load(PhaseRun(model, plans, sampling), prompts, progress=progress)
    result: dict[str, Any] = {
        "machine": machine(), "command": command_line(), "model": model.name, "dtype": model.dtype,
        "weights": model.weights, "threads": torch.get_num_threads(), "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens, "auto": run.plans["auto"].to_toml(),
        "text": [phase.to_json() for phase in text], "load": [phase.to_json() for phase in load],
    }  # fmt: skip
    if not arguments.json:
        for shown in (*result["text"], *result["load"]):
            times = ", ".join(f"{plan} {seconds:.2f} s" for plan, seconds in shown["seconds"].items())
            note(f"{shown['phase']}: auto takes {shown['auto_over_best']:.3f} of {shown['best_fixed']} ({times})")
    hand_out(result, arguments.output)
    return int(any(_differ(phase) for phase in (*text, *load)))


def _differ(phase: Phase) -> bool:
    return any(not one.is_tie for found in phase.differences.values() for one in found)
