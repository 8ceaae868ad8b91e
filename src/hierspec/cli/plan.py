"""Find the hierarchy that is fastest for a model on this machine: measure, search, run the best.

Records what every tier of the model would have drafted along the model's own answers, times forward passes, simulates
all plans on that record, and runs the best. --save makes the winner what the plan `auto` means for this model on this
machine, --output writes it as a plan file; without either nothing is written. --show tells what `auto` means now, and
--forget undoes --save. --simulate plans for machines and models that you do not have, from pass times and acceptance
rates (docs/planning.md has the file's keys).

examples:
  hierspec plan --explain
  hierspec plan --save
  hierspec plan ./Qwen3-0.6B --prompts prompts.jsonl --temperature 0.8 --output my-plan.toml
  hierspec plan ./Qwen3-8B --drafts ./Qwen3-0.6B,./Qwen3-1.7B-Q4_K_M.gguf,./eagle3-qwen3-8b --explain
  hierspec plan --temperature 1 --rule residual
  hierspec plan ./Qwen3-0.6B --show
  hierspec plan --simulate examples/whatif_hispec.toml --explain
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli import options, plan_saved, plan_simulate
from hierspec.cli.console import progress_bars
from hierspec.cli.files import InputFile, OutputFile
from hierspec.cli.parser import completes
from hierspec.cli.report import Report, command_line
from hierspec.core.errors import HierspecError
from hierspec.core.verify import RULES
from hierspec.sizes import parse_size

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.planner.choose import Choice

_SHOWN = 12  # plans in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_prompts_file(parser, "JSON lines with task and turns (default: 36 that ship)")
    parser.add_argument(
        "--limit", type=int, default=12, metavar="N", help="prompts, spread over the tasks (default 12)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--drafts",
        default="",
        metavar="A,B",
        help="draft models to choose from: folders, GGUF files, EAGLE heads, feature or small (default: the pack's)",
    )
    rule = parser.add_argument(
        "--rule", default="coupled", help="how drafts are verified: coupled (default), residual or block"
    )
    completes(rule, tuple(RULES))
    parser.add_argument("--max-memory", metavar="SIZE", help="leave out tiers that add more than this, such as 20M")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="plans to run besides plain (default 3)")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="to run each of them (default 8)")
    parser.add_argument("--explain", action="store_true", help="say why each tier is in or out")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--save", action="store_true", help="make the best plan what auto means, for this model here")
    what.add_argument("--show", action="store_true", help="show what auto means now; measure nothing")
    what.add_argument("--forget", action="store_true", help="undo --save; measure nothing")
    what.add_argument("--simulate", type=InputFile, metavar="FILE", help="plan from the figures of a TOML file instead")
    parser.add_argument(
        "--output",
        type=OutputFile,
        metavar="FILE",
        help="write the best plan to a TOML file, and pictures beside it; with --simulate: its picture (SVG)",
    )
    parser.add_argument("--results", type=OutputFile, metavar="FILE", help="write the JSON document to a file")
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.simulate is not None:
        return plan_simulate.run(arguments)
    if arguments.show or arguments.forget:
        if arguments.output is not None:
            raise HierspecError("--output writes the plan of a search; leave it out, or --show and --forget.")
        return plan_saved.run(arguments)
    if arguments.runs < 1 or arguments.limit < 1 or arguments.max_tokens < 8 or arguments.seconds <= 0:
        raise HierspecError("--runs, --limit and --seconds must be more than 0, and --max-tokens at least 8.")
    if arguments.rule not in RULES:
        raise HierspecError(f"There is no rule {arguments.rule!r}; rules are {', '.join(RULES)}.")
    from hierspec.core.sampling import Sampling
    from hierspec.machine import machine
    from hierspec.prompts import own_prompts, read_prompts, spread

    sampling = Sampling(temperature=arguments.temperature, seed=arguments.seed)
    prompts = spread(own_prompts() if arguments.prompts is None else read_prompts(arguments.prompts), arguments.limit)
    max_memory = None if arguments.max_memory is None else parse_size(arguments.max_memory)
    drafts = [options.usable_name("--drafts", draft) for draft in options.names(arguments.drafts)] or None
    if drafts is not None:
        from hierspec.planner.candidates import check_drafts_of

        check_drafts_of(arguments.model, drafts)  # before the model is loaded, which takes long
    model = options.load_model(arguments)
    from hierspec.planner.choose import choose
    from hierspec.planner.explain import explained

    with progress_bars() as progress:
        choice = choose(
            model,
            [(prompt.task, prompt.turns[0]) for prompt in prompts],
            sampling,
            arguments.max_tokens,
            arguments.runs,
            arguments.seconds,
            max_memory,
            progress,
            drafts,
            arguments.rule,
        )
    report = Report.of(arguments)
    _show(report, choice)
    for reason in explained(choice) if arguments.explain else []:
        report.line(reason)
    _write(report, arguments, model, choice)
    document = {
        "machine": machine(),
        "command": command_line(),
        "model": model.name,
        "dtype": model.dtype,
        "temperature": sampling.temperature,
        "rule": arguments.rule,
        "drafts": drafts,
        "max_tokens": arguments.max_tokens,
        "prompts": len(prompts),
        "saved": arguments.save,
        **choice.to_json(),
        "explained": explained(choice),
    }
    report.document(document, arguments.results)
    return 0


def _write(report: Report, arguments: argparse.Namespace, model: LanguageModel, choice: Choice) -> None:
    """The plan, only where it was asked for."""
    from hierspec.assembly.auto import save_plan, with_note
    from hierspec.paths import whole_file
    from hierspec.planner.explain import charts

    best, plain, output = choice.best, choice.plain, arguments.output
    assert best.measured is not None
    assert plain.measured is not None
    about = (
        f"made by: {command_line()}\n{best.name}: predicted "
        f"{plain.predicted.seconds_per_token / best.predicted.seconds_per_token:.2f}x, measured "
        f"{plain.measured / best.measured:.2f}x after the prompt, {model.dtype}, temperature {arguments.temperature}"
    )
    files: dict[Path, str] = {}
    if output is not None:
        files[output] = with_note(best.plan, about)
        files |= {output.with_name(f"{output.stem}-{name}.svg"): chart for name, chart in charts(choice).items()}
    for path, content in files.items():
        with whole_file(path) as temporary:
            temporary.write_text(content, encoding="utf-8", errors="backslashreplace")
    if arguments.save:
        save_plan(best.plan, model.about, about)
        report.line(f"Saved: the plan auto is now this one for {model.name} on this machine (--forget undoes it).")
    if output is not None:
        report.line(f"Written: {', '.join(path.name for path in files)}.")
    if not (arguments.save or output):
        report.line("Nothing was saved: --save makes this plan auto, --output FILE writes it as a plan file.")


def _show(report: Report, choice: Choice) -> None:
    from hierspec.planner.explain import simulated_score

    plain, best = choice.plain, choice.best
    report.table(
        f"The best hierarchy: {best.name}",
        ("tier", "ms/pass", "passes/token", "block", "accepted above", "time"),
        [_tier_row(level, tier) for level, tier in enumerate(simulated_score(best).tiers)],
    )
    report.line("")
    report.table(
        "Plans, the fastest first",
        ("plan", "predicted\nms/token", "measured\nms/token", "over\nplain", "tokens\n/pass", "adds\nMB"),
        [
            (
                result.name,
                f"{1e3 * result.predicted.seconds_per_token:.2f}",
                "" if result.measured is None else f"{1e3 * result.measured:.2f}",
                f"{plain.predicted.seconds_per_token / result.predicted.seconds_per_token:.2f}x"
                if result.measured is None or plain.measured is None
                else f"{plain.measured / result.measured:.2f}x",
                f"{result.predicted.tokens_per_pass:.2f}",
                "?" if result.memory is None else f"{result.memory / 1e6:.1f}",
            )
            for result in [*choice.results[:_SHOWN], *(result for result in choice.results[_SHOWN:] if result is plain)]
        ],
    )


def _tier_row(level: int, tier: Any) -> tuple[str, ...]:
    return (
        tier.tier,
        f"{1e3 * tier.seconds / tier.passes if tier.passes else 0.0:.2f}",
        f"{tier.passes:.2f}",
        f"{tier.block_tokens:.2f}",
        f"{100 * tier.accepted:.0f}%" if level else "",
        f"{100 * tier.share:.0f}%",
    )
