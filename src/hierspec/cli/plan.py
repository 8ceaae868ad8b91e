"""Find the hierarchy that is fastest for a model on this machine: measure, search, run the best, write a plan file.

Records what every tier of the model would have drafted along the model's own answers, times forward passes, simulates
all plans on that record, and runs the best. The result is a plan file, and from then on what the plan `auto` means for
this model on this machine. --simulate plans for machines and models that you do not have, from pass times and
acceptance rates (docs/planning.md has the file's keys).

examples:
  hierspec plan
  hierspec plan ./Qwen3-0.6B --prompts prompts.jsonl --temperature 0.8 --output my-plan.toml --explain
  hierspec plan --simulate examples/whatif_hispec.toml --explain
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hierspec.cli import options, plan_simulate
from hierspec.cli.console import command_line, hand_out, note, progress_bars, show_table
from hierspec.core.errors import HierspecError

if TYPE_CHECKING:
    from hierspec.planner.choose import Choice

_SHOWN = 12  # plans in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines with task and turns (default: 36 that ship)"
    )
    parser.add_argument(
        "--limit", type=int, default=12, metavar="N", help="prompts, spread over the tasks (default 12)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--max-memory", metavar="SIZE", help="leave out tiers that add more than this, such as 20M")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="plans to run besides plain (default 3)")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="to run each of them (default 8)")
    parser.add_argument("--explain", action="store_true", help="say why each tier is in or out")
    parser.add_argument("--simulate", type=Path, metavar="FILE", help="plan from the figures of a TOML file instead")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the plan file (default: plan.toml), pictures beside it; with --simulate the picture",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the JSON document to a file too")
    parser.add_argument("--json", action="store_true", help="only the JSON document, no tables")


def run(arguments: argparse.Namespace) -> int:
    if arguments.simulate is not None:
        return plan_simulate.run(arguments)
    if arguments.runs < 1 or arguments.limit < 1 or arguments.max_tokens < 8 or arguments.seconds <= 0:
        raise HierspecError("--runs, --limit and --seconds must be more than 0, and --max-tokens at least 8.")
    from hierspec.assembly.auto import save_plan, with_note
    from hierspec.core.sampling import Sampling
    from hierspec.machine import machine
    from hierspec.paths import whole_file
    from hierspec.planner.choose import choose
    from hierspec.planner.explain import charts, explained
    from hierspec.prompts import own_prompts, read_prompts, spread
    from hierspec.sizes import parse_size

    sampling = Sampling(temperature=arguments.temperature, seed=arguments.seed)
    prompts = spread(own_prompts() if arguments.prompts is None else read_prompts(arguments.prompts), arguments.limit)
    max_memory = None if arguments.max_memory is None else parse_size(arguments.max_memory)
    model = options.load_model(arguments)
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
        )
    best, plain = choice.best, choice.plain
    assert best.measured is not None
    assert plain.measured is not None
    output = arguments.output or Path("plan.toml")
    about = (
        f"made by: {command_line()}\n{best.name}: predicted "
        f"{plain.predicted.seconds_per_token / best.predicted.seconds_per_token:.2f}x, measured "
        f"{plain.measured / best.measured:.2f}x after the prompt, {model.dtype}, temperature {sampling.temperature}"
    )
    with whole_file(output) as temporary:
        temporary.write_text(with_note(best.plan, about), encoding="utf-8")
    for name, chart in charts(choice).items():
        with whole_file(output.with_name(f"{output.stem}-{name}.svg")) as temporary:
            temporary.write_text(chart, encoding="utf-8")
    save_plan(best.plan, model.about, about)
    if not arguments.json:
        _show(choice)
        for reason in explained(choice) if arguments.explain else []:
            note(reason)
        note(f"written to {output}; from now on the plan auto is this one for {model.name} on this machine")
    document = {
        "machine": machine(),
        "command": command_line(),
        "model": model.name,
        "dtype": model.dtype,
        "temperature": sampling.temperature,
        "max_tokens": arguments.max_tokens,
        "prompts": len(prompts),
        **choice.to_json(),
        "explained": explained(choice),
    }
    hand_out(document, arguments.results)
    return 0


def _show(choice: Choice) -> None:
    from hierspec.planner.explain import simulated_score

    plain, best = choice.plain, choice.best
    tiers = simulated_score(best).tiers
    rows = [
        (
            tier.tier,
            f"{1e3 * tier.seconds / tier.passes if tier.passes else 0.0:.2f}",
            f"{tier.passes:.2f}",
            f"{tier.block_tokens:.2f}",
            f"{100 * tier.accepted:.0f}%" if level else "",
            f"{100 * tier.share:.0f}%",
        )
        for level, tier in enumerate(tiers)
    ]
    show_table(
        f"The best hierarchy: {best.name}",
        ("tier", "ms/pass", "passes/token", "block", "accepted above", "time"),
        rows,
    )
    show_table(
        "Plans, the fastest first",
        ("plan", "predicted ms/token", "measured", "over plain", "tokens/pass"),
        [
            (
                result.name,
                f"{1e3 * result.predicted.seconds_per_token:.2f}",
                "" if result.measured is None else f"{1e3 * result.measured:.2f}",
                f"{plain.predicted.seconds_per_token / result.predicted.seconds_per_token:.2f}x"
                if result.measured is None or plain.measured is None
                else f"{plain.measured / result.measured:.2f}x",
                f"{result.predicted.tokens_per_pass:.2f}",
            )
            for result in [*choice.results[:_SHOWN], *(result for result in choice.results[_SHOWN:] if result is plain)]
        ],
    )
