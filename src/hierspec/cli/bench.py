"""Compare plans on prompts: equality with plain decoding first, then time.

Prompts are 36 that ship, or those of a file with one JSON object a line, with `task` and `turns`. Plans run
interleaved, prompt by prompt. The last line of standard output is one JSON document. Exits with 1 where a plan that
promises the same text wrote something else and no tie explains it.

examples:
  hierspec bench --prompts prompts.jsonl --plans plain,lookup,layerskip
  hierspec bench --prompts prompts.jsonl --plans lookup --peers transformers --limit 30 --max-tokens 64
  hierspec bench --install-peers
  hierspec bench --peers all --plans auto --weights int8
  hierspec bench --passes --peers transformers
  hierspec bench --store-times --output stores.json
  hierspec bench --store-soak --output soak.json
  hierspec bench --synthetic --rates token --limit 8 --max-tokens 128
  hierspec bench default-ee --exits 2,4,8,12 --prompts prompts.jsonl --limit 12 --output exits.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli import bench_peers, options
from hierspec.cli.console import command_line, hand_out, note, progress_bars
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec.paths import whole_file

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompts import BenchPrompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--prompts", type=Path, help="JSON lines with task and turns (default: 36 that ship)")
    parser.add_argument(
        "--passes", action="store_true", help="measure single passes instead: by width, context and part"
    )
    parser.add_argument(
        "--store-times", action="store_true",
        help="measure guessing and learning of stores by size instead, with no model; --output writes a chart too",
    )  # fmt: skip
    parser.add_argument(
        "--store-soak", action="store_true",
        help="let a history learn 200,000 requests and be killed 100 times instead: are limits kept, is text lost?",
    )  # fmt: skip
    parser.add_argument("--largest", type=int, metavar="N", help="--store-times: no store larger than N tokens")
    parser.add_argument(
        "--synthetic", action="store_true", help="HiSpec's setting on a random model of 32 layers: who agrees is played"
    )
    parser.add_argument(
        "--rates", choices=("block", "token"), default="block",
        help="synthetic: what the paper's rates are shares of (all drafted tokens, or those whose predecessors stood)",
    )  # fmt: skip
    parser.add_argument(
        "--exits", default="", metavar="N,N,…",
        help="every pair of these exits as draft and verifier, and each alone, beside what the formula predicts",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")
    parser.add_argument("--plans", default="auto", help="plans or TOML files, separated by commas (default: auto)")
    bench_peers.add_arguments(parser)
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
    if arguments.install_peers is not None:
        return bench_peers.install(arguments)
    if arguments.passes:
        return _passes(arguments, peers)
    if arguments.store_times:
        return _store_times(arguments)
    if arguments.store_soak:
        return _store_soak(arguments)
    if arguments.synthetic:
        return _synthetic(arguments)
    from hierspec.prompts import own_prompts, read_prompts, spread

    prompts = own_prompts() if arguments.prompts is None else read_prompts(arguments.prompts)
    if arguments.limit is not None:
        if arguments.limit < 1:
            raise HierspecError(f"--limit must be at least 1, not {arguments.limit}.")
        prompts = spread(prompts, arguments.limit)
    batches = _batches(arguments.batch)
    model = options.load_model(arguments)
    if arguments.exits:
        return _exits(arguments, model, prompts)
    plans = {name: model.plan(name) for name in arguments.plans.split(",") if name}
    for plan in plans.values():
        model.hierarchy(plan)  # a plan that cannot run is told before anything is measured

    from hierspec.bench.report import document
    from hierspec.bench.run import PLAIN, records, run_plans
    from hierspec.planner.playing.replay import write_records

    with progress_bars() as progress, bench_peers.opened(arguments, model, prompts, sampling, progress) as ready:
        found = run_plans(model, prompts, plans, sampling, ready.peers, progress, batches)
    about = _about(model) | {
        "temperature": sampling.temperature, "max_tokens": sampling.max_tokens, "prompts": _prompts_name(arguments),
        "stores": model.home.beginning(),
    }  # fmt: skip
    if arguments.record is not None:
        write_records(arguments.record, records(found[PLAIN]))
    result = document(found, [peer.name for peer in ready.peers], about)
    ready.describe(result)
    # Sampling under a rule that draws gives other tokens of the same law: only the coupled rule promises the same text.
    for name, figures in result["plans"].items():
        rule = plans.get(name.split(", batch of")[0], Plan()).rule
        figures["rule"], figures["promises_text"] = rule, rule == "coupled" or sampling.temperature == 0
    if not arguments.json:
        _table(result)
    hand_out(result, arguments.output)
    promised = [figures for figures in result["plans"].values() if figures["promises_text"]]
    return 1 if any(plan["identical"] + plan["ties"] < plan["prompts"] for plan in promised) else 0


def _prompts_name(arguments: argparse.Namespace) -> str:
    return "own" if arguments.prompts is None else str(arguments.prompts.name)


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
    from hierspec.machine import machine

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
    hand_out({"machine": machine(), **_about(model), **measured}, arguments.output)
    return 0


def _store_times(arguments: argparse.Namespace) -> int:
    if arguments.largest is not None and arguments.largest < 100:
        raise HierspecError(f"--largest must be at least 100 tokens, not {arguments.largest}.")
    from hierspec.bench.stores import CONTEXTS, CORPORA, HISTORIES, chart, measure_stores, no_larger
    from hierspec.machine import machine

    contexts, histories, corpora = (no_larger(sizes, arguments.largest) for sizes in (CONTEXTS, HISTORIES, CORPORA))
    with progress_bars() as progress:
        measured = measure_stores(progress, contexts, histories, corpora)
    if not arguments.json:
        for name in ("context", "history", "corpus"):
            for row in measured[name]:
                learnt = f", learning a token {row['learn_us']['median']}" if "learn_us" in row else ""
                guess = row["propose_us"]
                note(f"{name} of {row['tokens']:,}: a guess {guess['median']} us (99%: {guess['p99']}){learnt}")
    if arguments.output is not None:
        with whole_file(arguments.output.with_suffix(".svg")) as temporary:
            temporary.write_text(chart(measured).svg(), encoding="utf-8")
    hand_out({"machine": machine(), "command": command_line(), **measured}, arguments.output)
    return 0


def _store_soak(arguments: argparse.Namespace) -> int:
    from hierspec.bench.soak import kill_while_writing, soak
    from hierspec.machine import machine

    with progress_bars() as progress:
        soaked, killed = soak(progress=progress), kill_while_writing(progress=progress)
    if not arguments.json:
        for found in soaked:
            note(
                f"{found['requests']:,} requests, {found['history']}: at most {found['most_bytes']:,} bytes of memory "
                f"and {found['most_file_bytes']:,} on disk, the limit is {found['limit']:,} each"
            )
        note(f"{killed['kills']} kills: {killed['lost']} batches lost, {killed['corrupted']} files damaged")
    hand_out({"machine": machine(), "command": command_line(), "soak": soaked, "kills": killed}, arguments.output)
    harm = killed["lost"] + killed["corrupted"] + killed["over_limit"]
    return 0 if harm == 0 and all(found["within_limit"] for found in soaked) else 1


def _synthetic(arguments: argparse.Namespace) -> int:
    from hierspec.bench import synthetic
    from hierspec.bench.report import document
    from hierspec.bench.run import run_plans

    sampling = options.chosen_sampling(arguments)
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(max(1, arguments.threads))
    model = synthetic.random_model() if arguments.model is None else options.load_model(arguments)
    rates = synthetic.setting(arguments.rates)
    plans = synthetic.plans(model.config.layers, rates)
    prompts = synthetic.some_prompts(arguments.limit or 8)
    with progress_bars() as progress:
        predicted = synthetic.predictions(model, rates, progress)
        found = run_plans(model, prompts, plans, sampling, (), progress)
    about = _about(model) | {
        "synthetic": True, "rates": {"reading": arguments.rates, **vars(rates)},
        "temperature": sampling.temperature, "max_tokens": sampling.max_tokens,
    }  # fmt: skip
    result = document(found, [], about)
    result["setting"] = synthetic.compared(result, predicted)
    if not arguments.json:
        _table(result)
        for pair, measured in result["setting"]["measured"].items():
            formula, paper = (result["setting"][which].get(pair, "-") for which in ("formula", "paper"))
            note(f"{pair}: measured {measured}x, the formula {formula}, the paper {paper}")
    hand_out(result, arguments.output)
    return 1 if any(plan["identical"] + plan["ties"] < plan["prompts"] for plan in result["plans"].values()) else 0


def _exits(arguments: argparse.Namespace, model: LanguageModel, prompts: list[BenchPrompt]) -> int:
    import torch

    from hierspec.bench import exits
    from hierspec.bench.report import document
    from hierspec.bench.run import run_plans
    from hierspec.checkpoints.load import load_checkpoint
    from hierspec.train.examine import examine

    sampling = options.chosen_sampling(arguments)
    layers = options.numbers("--exits", arguments.exits)
    exits.check_exits(layers, model.config.layers)
    with progress_bars() as progress:
        checkpoint = load_checkpoint(arguments.model, torch.float32, progress, arguments.pack)
        agreement = examine(model, checkpoint, prompts, sampling.max_tokens, progress, layers)["agreement"]["all"]
        plans, predicted = exits.exit_plans(model, layers, agreement, progress)
        found = run_plans(model, prompts, plans, sampling, (), progress)
    result = document(found, [], _about(model) | {"temperature": sampling.temperature,
                      "max_tokens": sampling.max_tokens, "prompts": _prompts_name(arguments)})  # fmt: skip
    result["agreement"], result["exits"] = agreement, exits.side_by_side(result, plans, predicted)
    if not arguments.json:
        for row in result["exits"]:
            verifier = f"verifier {row['verifier']}" if row["verifier"] else f"alone, {row['gather'][0]} tokens"
            note(f"draft {row['draft']}, {verifier}: {row['measured']}x, the formula {row['formula']}x")
    if arguments.output is not None:
        with whole_file(arguments.output.with_suffix(".svg")) as temporary:
            temporary.write_text(exits.chart(result["exits"]).svg(), encoding="utf-8")
    hand_out(result, arguments.output)
    return 1 if any(plan["identical"] + plan["ties"] < plan["prompts"] for plan in result["plans"].values()) else 0


def _about(model: LanguageModel) -> dict[str, Any]:
    backend = type(model.decoder).__name__
    return {
        "command": command_line(), "model": model.name, "dtype": model.dtype, "weights": model.weights,
        "decoder": backend, "products": model.decoder.products, "dtype_seconds": dict(model.dtype_choice.seconds),
    }  # fmt: skip


def _table(result: dict[str, Any]) -> None:
    try:
        from rich.table import Table
    except ImportError:  # the JSON document says it all
        return
    table = Table("plan", "identical", "speed-up", "95%", "tokens/s", "decode tokens/s", "tokens/pass")
    for name, plan in (result["plans"] | result["peers"]).items():
        same = f"{plan['identical']} of {plan['prompts']}" + (f", {plan['ties']} ties" if plan["ties"] else "")
        if not plan.get("promises_text", True):
            same = f"same law ({plan['rule']})"
        low, high = plan["speedup_interval"]
        marked = name + (" (synthetic)" if plan.get("synthetic") else "")  # and once more below: cells are narrow
        table.add_row(
            marked, same, f"{plan['speedup']:.2f}x", f"{low:.2f} to {high:.2f}", f"{plan['tokens_per_second']:.1f}",
            f"{plan.get('decode_tokens_per_second', '')}", f"{plan.get('tokens_per_pass', '')}",
        )  # fmt: skip
    note(table)
    synthetic = [name for name, plan in result["plans"].items() if plan.get("synthetic")]
    if synthetic:
        note(f"synthetic acceptance: {', '.join(synthetic)}. The text is the model's, the speed is not.")
