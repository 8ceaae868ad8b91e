"""Compare plans on a file of prompts: equality with plain decoding first, then time.

The file has one JSON object a line, with `task` and `turns`. Plans run interleaved, prompt by prompt. The last line
of standard output is one JSON document. Exits with 1 where a plan wrote something else and no tie explains it.

examples:
  hierspec bench --prompts prompts.jsonl --plans plain,lookup,layerskip
  hierspec bench --prompts prompts.jsonl --plans lookup --peers transformers --limit 30 --max-tokens 64
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with task and turns")
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")
    parser.add_argument("--plans", default="lookup", help="plans or TOML files, separated by commas (default: lookup)")
    parser.add_argument("--peers", default="", help="transformers, transformers:lookup (greedy only)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="run every plan also N prompts side by side")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON document to a file too")
    parser.add_argument("--json", action="store_true", help="only the JSON document, no table")
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    sampling = options.chosen_sampling(arguments)
    peers = [name for name in arguments.peers.split(",") if name]
    if peers and sampling.temperature > 0:
        raise HierspecError("Peers are compared at temperature 0 only; leave out --peers or --temperature.")
    from hierspec.bench.prompts import read_prompts, spread

    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        if arguments.limit < 1:
            raise HierspecError(f"--limit must be at least 1, not {arguments.limit}.")
        prompts = spread(prompts, arguments.limit)
    if arguments.batch < 1:
        raise HierspecError(f"--batch must be at least 1, not {arguments.batch}.")
    model = options.load_model(arguments)
    plans = {name: model.plan(name) for name in arguments.plans.split(",") if name}
    for plan in plans.values():
        model.hierarchy(plan)  # a plan that cannot run is told before anything is measured

    from hierspec.bench.peers import open_peer
    from hierspec.bench.report import document
    from hierspec.bench.run import run_plans

    opened = [open_peer(name, model.folder, model.dtype, str(model.decoder.device), model.stop_ids) for name in peers]
    with progress_bars() as progress:
        found = run_plans(model, prompts, plans, sampling, opened, progress, arguments.batch)
    about = {
        "command": shlex.join(["hierspec", *sys.argv[1:]]), "model": model.name, "dtype": model.dtype,
        "temperature": sampling.temperature, "max_tokens": sampling.max_tokens, "prompts": arguments.prompts.name,
    }  # fmt: skip
    result = document(found, peers, about)
    if not arguments.json:
        _table(result)
    text = json.dumps(result, ensure_ascii=False)
    if arguments.output is not None:
        with whole_file(arguments.output) as temporary:
            temporary.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(text)
    unexplained = sum(plan["prompts"] - plan["identical"] - plan["ties"] for plan in result["plans"].values())
    return 1 if unexplained else 0


def _table(result: dict[str, Any]) -> None:
    try:
        from rich.table import Table
    except ImportError:  # the JSON document says it all
        return
    table = Table("plan", "identical", "speed-up", "95%", "tokens/s", "decode tokens/s", "tokens/pass")
    for name, plan in (result["plans"] | result["peers"]).items():
        same = f"{plan['identical']} of {plan['prompts']}" + (f", {plan['ties']} ties" if plan["ties"] else "")
        low, high = plan["speedup_interval"]
        table.add_row(
            name, same, f"{plan['speedup']:.2f}x", f"{low:.2f} to {high:.2f}", f"{plan['tokens_per_second']:.1f}",
            f"{plan.get('decode_tokens_per_second', '')}", f"{plan.get('tokens_per_pass', '')}",
        )  # fmt: skip
    note(table)
