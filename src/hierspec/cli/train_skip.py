"""Search for layers that a model can leave out when it drafts for itself. Nothing is trained; a plan is written.

examples:
  hierspec train skip --output skip.toml
  hierspec train skip ./my-model --prompts prompts.jsonl --limit 12 --output skip.toml
"""

from __future__ import annotations

import argparse

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.files import OutputFile
from hierspec.cli.report import print_document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, enlarged=False)
    options.add_answered_prompts(parser, "JSON lines with turns (default: a few of ours)", max_tokens=64)
    parser.add_argument(
        "--output", type=OutputFile, metavar="FILE", help="write the plan to a TOML file, not to stdout"
    )
    options.add_json(parser, "all sets that were tried, as one JSON document")


def run(arguments: argparse.Namespace) -> int:
    prompts = options.chosen_prompts(arguments)
    model = options.load_model(arguments)
    from hierspec.paths import whole_file
    from hierspec.scorers.skipping import in_runs
    from hierspec.train.skip import calibration, search

    with progress_bars() as progress:
        given = {} if prompts is None else {"prompts": [prompt.turns[0] for prompt in prompts]}
        texts = calibration(model, **given, max_tokens=arguments.max_tokens, progress=progress)
        drafts = search(model, texts, progress)
    best = drafts[0]
    tokens = sum(len(text.answer) for text in texts)
    summary = f"agrees on {best.agreement:.0%} of {tokens} tokens, predicted {best.speedup:.2f}x of plain decoding"
    plan = f"# made by: hierspec train skip      {summary}\n" + best.plan(arguments.model).to_toml()
    if arguments.output is not None:
        with whole_file(arguments.output) as temporary:
            temporary.write_text(plan, encoding="utf-8")
    if arguments.json:
        sets = [vars(draft) for draft in drafts]
        print_document({"model": model.name, "tokens": tokens, "sets": sets})
    elif arguments.output is None:
        print(plan, end="")
    note(f"without layers {in_runs(best.skipped)}: {summary}")
    return 0
