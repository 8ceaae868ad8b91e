"""Count how often a pack's drafts are accepted, and let the pack ship it: so that a new process drafts well from its
first token on. Counted under the plan auto, on the model's answers to prompts; only counts are kept, no text.

examples:
  hierspec train prior --pack my-pack --prompts prompts.jsonl
  hierspec train prior ./my-model --pack my-pack
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hierspec.cli import options
from hierspec.cli.console import progress_bars
from hierspec.cli.files import OutputFolder
from hierspec.cli.report import Report, command_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, enlarged=False)
    options.add_answered_prompts(
        parser, "JSON lines with task and turns (default: the 36 of this project)", max_tokens=96
    )
    parser.add_argument(
        "--output", type=OutputFolder, metavar="FOLDER", help="the pack that gets it (default: that of the model)"
    )
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    prompts = options.chosen_prompts(arguments)
    if prompts is None:
        from hierspec.prompts import own_prompts, spread

        prompts = own_prompts() if arguments.limit is None else spread(own_prompts(), arguments.limit)
    model = options.load_model(arguments, plans=())
    from hierspec.train.prior import add_prior, learn_prior, pack_of

    folder: Path = arguments.output or pack_of(model).folder
    with progress_bars() as progress:
        learnt = learn_prior(model, prompts, max_tokens=arguments.max_tokens, progress=progress)
    add_prior(model, learnt, folder)
    report = Report.of(arguments)
    report.table(
        "Learnt", ("part", "classes"), [(name, str(len(part.get("acceptance", ())))) for name, part in learnt.items()]
    )
    report.document({"command": command_line(), "model": model.name, "folder": str(folder), "prompts": len(prompts)})
    return 0
