"""What each database of Hierarchy Drafting adds, and whether the order matters: every subset in every order, run with
the model itself.

The stores are those of a plan, which is run with all of them and with fewer, in every order of asking; all else stays
as the plan says. Optional stores that are not there are left out. Plans run interleaved, prompt by prompt, beside plain
decoding, whose text all must write. A replay of recorded answers (hierspec store replay --ablation) needs no model, but
says nothing of `lookahead`, and nothing of what stores cost a pass.

It made docs/results/store-orders.json.

examples:
  python experiments/store_orders.py --like hd --prompts spec-bench --limit 24 --max-tokens 64 --output orders.json
  python experiments/store_orders.py --like hd+ --subsets-only --limit 6 --max-tokens 32
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import hand_out
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec_bench.cli import common
from hierspec_bench.document import document
from hierspec_bench.provenance import prompt_set
from hierspec_bench.record import Record
from hierspec_bench.run import run_plans

_BETWEEN = " > "  # between a plan's stores, in the order of asking


def ordered_plans(plan: Plan, existing: Sequence[str], subsets_only: bool = False) -> dict[str, Plan]:
    """The plan with every subset of these stores in every order, or only in the order given."""
    arranged = combinations if subsets_only else permutations
    return {
        _BETWEEN.join(stores).replace("?", ""): replace(plan, stores=tuple(stores))
        for size in range(1, len(existing) + 1)
        for stores in arranged(existing, size)
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--like", default="hd", metavar="PLAN", help="the plan whose stores are arranged (default hd)")
    parser.add_argument("--subsets-only", action="store_true", help="each subset once, in the plan's order")
    common.add_prompts(parser)
    common.add_output(parser)
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    name, prompts = common.chosen_prompts(arguments)
    sampling = options.chosen_sampling(arguments)
    model = options.load_model(arguments, plans=(arguments.like,))
    plan = model.plan(arguments.like)
    existing = [store for store in plan.stores if model.hierarchy(replace(plan, stores=(store,))).tiers[0].stores]
    if not existing:
        raise HierspecError(f"The plan {arguments.like} has no stores here; name one with stores, such as hd.")
    plans = ordered_plans(plan, existing, arguments.subsets_only)
    with progress_bars() as progress:
        results = run_plans(model, prompts, plans, sampling, (), progress)
    about = common.about_model(model) | {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    about |= {"like": arguments.like, "plan": plan.to_toml(), "stores": model.home.beginning()}
    result = document(results, [], about | {"prompts": prompt_set(name, prompts)})
    if not arguments.json:
        for stores in plans:
            figures = result["plans"][stores]
            note(f"{stores}: {figures['tokens_per_pass']} tokens a pass, {figures['speedup']}x")
    hand_out(result, arguments.output)
    return 1 if any(entry.figures.different for entry in Record.of(result).main.entries) else 0


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
