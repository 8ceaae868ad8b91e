"""HiSpec's tables on a model of your own, on a CPU or a GPU, as it is or at the cost of a larger one, in one record.

Parts, in the order in which they are run while time is left:
  named      layerskip (the paper's baseline, 4 tokens), adadecode, hispec, and our layerskip+ and hispec+, by task
  time       seconds of drafting, intermediate and final verification apart, without prefill
  blocks     N_d tokens drafted x N_i verified, and one exit alone in equal blocks: what the target accepts with and
             without the verifier (paper: 58.1% and 39.7%)
  pairs      draft layer x verifier layer, 2 tokens drafted and 4 verified
  batches    throughput of several prompts at once
  agreement  how often exits agree with the last layer, for each file of --agreement (not for an enlarged model)

Every text is compared with plain decoding's; exits with 1 where one differs and no tie explains it. With --output the
file has what was measured so far at any time. A small run on a loaded CPU, to see that it works:
docs/results/hispec-tables.json.

examples:
  python experiments/hispec_tables.py default-ee --prompts spec-bench --limit 24 --max-tokens 96 --output tables.json
  python experiments/hispec_tables.py default-ee --device cuda --enlarged 8B --limit 60 --seconds 560 --output 8b.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from hispec_pairs import DRAFTED, VERIFIED, check_exits

from hierspec.checkpoints.load import load_checkpoint
from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import hand_out, write_document
from hierspec.cli.status import DIFFERENT
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.core.stats import Stats
from hierspec.language_model import LanguageModel
from hierspec.machine import machine
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt, read_prompts, spread
from hierspec.train.examine import examine
from hierspec_bench.cli import common
from hierspec_bench.document import summary
from hierspec_bench.gpu.timing import Deadline
from hierspec_bench.provenance import prompt_set
from hierspec_bench.run import PLAIN, SideBySide

PARTS = ("named", "time", "blocks", "pairs", "batches", "agreement")
PLANS = ("layerskip", "adadecode", "hispec", "layerskip+", "hispec+")
DRAFT_LENGTHS, BLOCKS = (2, 4, 6, 8), (4, 8, 12, 16)  # the paper's N_d and N_i
_WEIGHTS = {"named": 5.0, "time": 1.0, "blocks": 5.0, "pairs": 3.0, "batches": 3.0, "agreement": 2.0}
_WARM_UP = 6  # prompts of different tasks
_FIGURES = ("speedup", "speedup_interval", "tokens_per_pass", "tokens_per_second", "decode_tokens_per_second")


def ladder(draft: int, verifier: int, drafted: int, verified: int) -> Plan:
    """A plan with the paper's blocks. The verifier's last round may give `drafted` tokens more than it needs."""
    tiers = (
        TierPlan(exit_layer=verifier, gather=verified, budget=max(7, drafted)),
        TierPlan(exit_layer=draft, gather=drafted),
    )
    return Plan(budget=max(7, verified + drafted), tiers=tiers)


def one_exit(draft: int, drafted: int) -> Plan:
    return Plan(budget=max(7, drafted), tiers=(TierPlan(exit_layer=draft, gather=drafted),))


@dataclass
class Tables:
    """The parts of one record; `keep` is called after each."""

    model: LanguageModel
    prompts: Sequence[BenchPrompt]
    sampling: Sampling
    exits: Sequence[int]
    batches: Sequence[int] = ()
    sets: Mapping[str, Sequence[BenchPrompt]] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    different: int = 0  # texts that differ from plain decoding's without a tie

    def __post_init__(self) -> None:
        self.prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in self.prompts]
        upper, lower = self.model.plan("hispec").tiers
        assert upper.exit_layer is not None
        assert lower.exit_layer is not None
        self.draft, self.verifier = lower.exit_layer, upper.exit_layer

    def run(self, parts: Sequence[str], seconds: float, keep: Callable[[], None], progress: Progress = silent) -> None:
        whole = Deadline(seconds)
        self.record["parts"] = []
        for number, part in enumerate(parts):
            share = _WEIGHTS[part] / sum(_WEIGHTS[other] for other in parts[number:])
            began, deadline = time.perf_counter(), whole.until(share * whole.left)
            row: dict[str, Any] = {"part": part}
            try:
                row["complete"] = not deadline.over and getattr(self, f"_{part}")(deadline, progress)
            except (HierspecError, RuntimeError) as error:  # a failing part must not stop the others
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            self.record["parts"].append({**row, "seconds": round(time.perf_counter() - began, 1)})
            keep()

    def _named(self, deadline: Deadline, progress: Progress) -> bool:
        plans = {name: self.model.plan(name) for name in PLANS}
        return self._measure("named", plans, deadline, progress, tasks=True)

    def _blocks(self, deadline: Deadline, progress: Progress) -> bool:
        plans = {f"{size} alone": one_exit(self.draft, size) for size in BLOCKS}
        for drafted in DRAFT_LENGTHS:
            for verified in BLOCKS:
                plans[f"{drafted} x {verified}"] = ladder(self.draft, self.verifier, drafted, verified)
        complete = self._measure("blocks", plans, deadline, progress)
        rows = self.record.get("blocks", {})
        self.record["accepted_at_the_target"] = {
            str(size): {"without": rows[f"{size} alone"]["accepted"], "with": rows[f"{DRAFTED} x {size}"]["accepted"]}
            for size in BLOCKS
            if f"{size} alone" in rows
        }
        return complete

    def _pairs(self, deadline: Deadline, progress: Progress) -> bool:
        plans = {f"{exit} alone": one_exit(exit, VERIFIED) for exit in self.exits}
        for low, high in combinations(self.exits, 2):
            plans[f"{low} under {high}"] = ladder(low, high, DRAFTED, VERIFIED)
        return self._measure("pairs", plans, deadline, progress)

    def _batches(self, deadline: Deadline, progress: Progress) -> bool:
        plans = {name: self.model.plan(name) for name in ("layerskip", "hispec", "hispec+")}
        return self._measure("batches", plans, deadline, progress, self.batches)

    def _measure(
        self,
        part: str,
        plans: Mapping[str, Plan],
        deadline: Deadline,
        progress: Progress,
        batches: Sequence[int] = (),
        tasks: bool = False,
    ) -> bool:
        """Runs these plans side by side, and keeps the figures that the tables need."""
        bench = SideBySide(
            self.model, self.prompts, plans, [self.sampling], batches=[size for size in batches if size > 1]
        )
        if self.model.decoder.backend.device.type == "cuda":  # on CUDA, the first passes of a shape compile and record
            for prompt in spread(self.prompts, _WARM_UP):
                for plan in plans.values():
                    self.model.apart().generate(prompt.turns[0], plan=plan, sampling=self.sampling)
        bench.run(progress, over=lambda: bench.done > 0 and deadline.over)
        [results] = bench.results
        rows: dict[str, Any] = {}
        for name, answered in results.items():
            if not answered:
                continue
            figures = summary(answered, results[PLAIN], self.sampling.temperature)
            self.different += figures["prompts"] - figures["identical"] - figures["ties"]
            rows[name] = row = {key: figures[key] for key in _FIGURES if key in figures}
            row |= {"prompts": figures["prompts"], "identical": figures["identical"], "ties": figures["ties"]}
            row["tiers"] = [
                {key: tier[key] for key in ("tier", "calls", "written", "proposed_by_depth", "accepted_by_depth")}
                for tier in figures["tiers"]
            ]
            row["accepted"] = _share(row["tiers"][0])
            if tasks:
                row["tasks"] = {task: of_task["speedup"] for task, of_task in figures["tasks"].items()}
        self.record[part] = rows
        return bench.done == bench.total

    def _time(self, deadline: Deadline, progress: Progress) -> bool:
        """Times of what is written after the prompt: each plan has prefilled it before the clock starts."""
        rows: dict[str, Any] = {}
        totals = {name: Stats() for name in PLANS}
        done = 0
        for prompt in self.prompts:
            if deadline.over:
                break
            for name, total in totals.items():
                self.model.forget()
                plan, apart = self.model.plan(name), self.model.apart()
                apart.generate(prompt.turns[0], plan=plan, sampling=replace(self.sampling, max_tokens=2))
                total.add(apart.generate(prompt.turns[0], plan=plan, sampling=self.sampling).stats)
            done += 1
            progress("Taking times apart", done, len(self.prompts))
        for name, total in totals.items():
            if not total.tiers:
                continue
            final, *others = [tier.seconds for tier in total.tiers]
            drafting, intermediate = others[-1], sum(others[:-1])
            rows[name] = {
                "tokens": total.tiers[0].written,
                "drafting": round(drafting, 4),
                "intermediate": round(intermediate, 4),
                "final": round(final, 4),
                "verification over drafting": round((intermediate + final) / drafting, 3) if drafting else None,
            }
        self.record["time"] = rows
        return done == len(self.prompts)

    def _agreement(self, deadline: Deadline, progress: Progress) -> bool:
        """By task and over all of each set."""
        if self.model.enlarged:
            self.record["agreement"] = "as without --enlarged"
            return True
        source = self.record["source"]
        checkpoint = load_checkpoint(source["model"], torch.float32, progress, source["pack"])
        self.record["agreement"] = {}
        for name, prompts in self.sets.items():
            if deadline.over:
                return False
            found = examine(self.model, checkpoint, prompts, self.sampling.max_tokens, progress, self.exits)
            self.record["agreement"][name] = found
        return True


def _share(tier: Mapping[str, Any]) -> float | None:
    """The share of the tokens drafted for a tier that it accepted."""
    proposed = sum(tier["proposed_by_depth"])
    return round(sum(tier["accepted_by_depth"]) / proposed, 4) if proposed else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    common.add_prompts(parser)
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), metavar="NAMES", help=f"only some of {', '.join(PARTS)}")
    add("--exits", default="", metavar="N,N,…", help="of pairs and agreement (default: those of the pack)")
    add("--batch", default="4,16", metavar="N,…", help="prompts at once (default 4,16)")
    add("--agreement", type=Path, nargs="*", default=[], metavar="FILE", help="more prompts to measure agreement on")
    add("--seconds", type=float, default=1e6, metavar="S", help="for all of it (default: as long as it takes)")
    common.add_output(parser)
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    parts = options.names(arguments.parts)
    if wrong := [part for part in parts if part not in PARTS]:
        raise HierspecError(f"There is no part {wrong[0]!r}; choose some of {', '.join(PARTS)}.")
    title, prompts = common.chosen_prompts(arguments)
    sampling, batches = options.chosen_sampling(arguments), common.batch_sizes("--batch", arguments.batch)
    sets = {title: prompts} | {path.stem: spread(read_prompts(path), len(prompts)) for path in arguments.agreement}
    exits = options.numbers("--exits", arguments.exits)
    model = options.load_model(arguments)
    pack = model.pack
    exits = exits or ([] if pack is None else sorted({*pack.exits(), *pack.exits_with_norm()}))
    check_exits(exits, model.config.layers)
    tables = Tables(model, prompts, sampling, exits, batches, sets)
    tables.record |= {**common.about_model(model), "machine": machine(), "device": str(model.decoder.backend.device)}
    tables.record |= {"source": {"model": arguments.model, "pack": arguments.pack}, "exits": exits}
    tables.record |= {"draft": tables.draft, "verifier": tables.verifier, "max_tokens": sampling.max_tokens}
    tables.record |= {"temperature": sampling.temperature, "prompts": prompt_set(title, prompts)}

    def keep() -> None:
        if arguments.output is not None:
            write_document(tables.record, arguments.output)

    with progress_bars() as progress:
        tables.run(parts, arguments.seconds, keep, progress)
    for name, row in tables.record.get("named", {}).items():
        note(f"{name}: {row['speedup']}x, {row['tokens_per_pass']} tokens a pass, accepted {row['accepted']}")
    for size, shares in tables.record.get("accepted_at_the_target", {}).items():
        note(f"blocks of {size}: the target accepts {shares['without']} without the verifier, {shares['with']} with it")
    hand_out(tables.record, arguments.output)
    return DIFFERENT if tables.different else 0


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
