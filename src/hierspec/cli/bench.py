"""Compare plans on a file of prompts: equality with plain decoding first, then time.

The file has one JSON object a line, with `task` and `turns`. Plans run interleaved, prompt by prompt. The last line
of standard output is one JSON document. Exits with 1 where a plan that promises the same text wrote something else and
no tie explains it.

examples:
  hierspec bench --prompts prompts.jsonl --plans plain,lookup,layerskip
  hierspec bench --prompts prompts.jsonl --plans lookup --peers transformers --limit 30 --max-tokens 64
  hierspec bench --passes --peers transformers
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--prompts", type=Path, help="JSON lines with task and turns")
    parser.add_argument(
        "--passes", action="store_true", help="measure single passes instead: by width, context and part"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")
    parser.add_argument("--plans", default="lookup", help="plans or TOML files, separated by commas (default: lookup)")
    parser.add_argument("--peers", default="", help="transformers, transformers:lookup (greedy only)")
    parser.add_argument(
        "--batch", default="", metavar="N,…", help="run every plan also with so many prompts side by side"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what plain decoding wrote, for store replay")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON document to a file too")
    parser.add_argument("--json", action="store_true", help="only the JSON document, no table")
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    sampling = options.chosen_sampling(arguments)
    peers = [name for name in arguments.peers.split(",") if name]
    if peers and sampling.temperature > 0:
        raise HierspecError("Peers are compared at temperature 0 only; leave out --peers or --temperature.")
    if arguments.passes:
        return _passes(arguments, peers)
    if arguments.prompts is None:
        raise HierspecError("There are no prompts; give a file with --prompts, or measure single passes with --passes.")
    from hierspec.bench.prompts import read_prompts, spread

    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        if arguments.limit < 1:
            raise HierspecError(f"--limit must be at least 1, not {arguments.limit}.")
        prompts = spread(prompts, arguments.limit)
    batches = _batches(arguments.batch)
    model = options.load_model(arguments)
    plans = {name: model.plan(name) for name in arguments.plans.split(",") if name}
    for plan in plans.values():
        model.hierarchy(plan)  # a plan that cannot run is told before anything is measured

    from hierspec.bench.peers import open_peer
    from hierspec.bench.report import document
    from hierspec.bench.run import PLAIN, records, run_plans
    from hierspec.planner.replay import write_records

    opened = [open_peer(name, model.folder, model.dtype, str(model.decoder.device), model.stop_ids) for name in peers]
    with progress_bars() as progress:
        found = run_plans(model, prompts, plans, sampling, opened, progress, batches)
    about = _about(model) | {
        "temperature": sampling.temperature, "max_tokens": sampling.max_tokens, "prompts": arguments.prompts.name,
        "stores": {
            "history": "a copy of what was built" if model.home.history.exists() else "empty",
            "corpus": "as built" if model.home.corpus.exists() else "none",
        },
    }  # fmt: skip
    if arguments.record is not None:
        write_records(arguments.record, records(found[PLAIN]))
    result = document(found, peers, about)
    if not arguments.json:
        _table(result)
    _hand_out(result, arguments.output)
    # Sampling under the residual rule gives other tokens of the same law: only the coupled rule promises the same text.
    exact = [name for name, plan in plans.items() if plan.rule == "coupled" or sampling.temperature == 0]
    promised = [figures for name, figures in result["plans"].items() if name.split(", batch of")[0] in exact]
    return 1 if any(plan["identical"] + plan["ties"] < plan["prompts"] for plan in promised) else 0


def _batches(text: str) -> list[int]:
    try:
        found = [int(number) for number in text.split(",") if number]
    except ValueError as error:
        raise HierspecError(f"--batch must be numbers separated by commas, not {text!r}.") from error
    if any(number < 1 for number in found):
        raise HierspecError(f"--batch must be at least 1, not {text}.")
    return [number for number in found if number > 1]


def _passes(arguments: argparse.Namespace, peers: list[str]) -> int:
    model = options.load_model(arguments)
    from hierspec.bench.passes import measure_passes
    from hierspec.bench.peers import open_peer
    from hierspec.bench.report import machine

    device = str(model.decoder.device)
    peer = open_peer(peers[0], model.folder, model.dtype, device, model.stop_ids) if peers else None
    with progress_bars() as progress:
        measured = measure_passes(model, peer, progress=progress)
    if not arguments.json:
        for item in measured["prefill"]:
            note(f"prefill of {item['tokens']} tokens by {item['by']}: {item['tokens_per_second']} tokens/s")
        for item in measured["passes"]:
            by = item.get("by", "hierspec")
            parts = (
                f"layers {item['layers_ms']}, head {item['head_ms']}, pick {item['pick_ms']}" if "ratio" in item else ""
            )
            note(f"context {item['context']}, {item['tokens']} tokens, {by}: {item['ms']} ms {parts}")
        note(f"reading the weights once takes {measured['reading_weights_once_ms']} ms")
    _hand_out({"machine": machine(), **_about(model), **measured}, arguments.output)
    return 0


def _about(model: LanguageModel) -> dict[str, Any]:
    command = shlex.join(["hierspec", *sys.argv[1:]])
    backend = type(model.decoder).__name__
    return {
        "command": command, "model": model.name, "dtype": model.dtype, "weights": model.weights, "decoder": backend,
        "products": model.decoder.products, "dtype_seconds": dict(model.dtype_choice.seconds),
    }  # fmt: skip


def _hand_out(result: dict[str, Any], output: Path | None) -> None:
    """The document as the last line of standard output, and as a file where one was asked for."""
    if output is not None:
        with whole_file(output) as temporary:
            temporary.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, ensure_ascii=False))


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
