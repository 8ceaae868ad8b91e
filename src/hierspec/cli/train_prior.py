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
    options.add_model(parser)
    options.add_prompts_file(parser, "JSON lines with task and turns (default: the 36 of this project)")
    options.add_limit(parser)
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of each answer (default 96)")
    parser.add_argument(
        "--output", type=OutputFolder, metavar="FOLDER", help="the pack that gets it (default: that of the model)"
    )
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    options.at_least_one(arguments, "limit", "max-tokens")
    from hierspec.prompts import own_prompts, read_prompts, spread

    prompts = own_prompts() if arguments.prompts is None else read_prompts(arguments.prompts)
    if arguments.limit is not None:
        prompts = spread(prompts, arguments.limit)
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
