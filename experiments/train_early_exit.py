"""Trains variants of an early-exit recipe one after the other, unattended, within so many minutes, and keeps the best.

The aim is a verifier (the second exit) that knows clearly more than the draft exit. The model writes conversations
first; then each variant of the recipe is trained and measured as it would be stored; the best one goes on for longer at
half the rate. For a machine without a network and with short commands: a call that runs out of --minutes pauses, and
the same command goes on where it was; after every stage the best pack so far and the record are written. The last line
is a JSON document. Two steps on a CPU with a tiny model, to see that it runs: docs/results/train-early-exit.json.

example:
  python experiments/train_early_exit.py --prompts questions.jsonl --text books/*.txt --held-text other.txt \
    --measure prompts.jsonl --work work --best pack --results record.json --minutes 9
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from early_exit_variants import AIMS, USUAL, VARIANTS, Variant, next_drift, shortfall
from safetensors.torch import load_file, save_file

from hierspec.checkpoints.delta import ChangedWeights
from hierspec.checkpoints.eight_bits import stored_bytes
from hierspec.checkpoints.load import Checkpoint, load_checkpoint
from hierspec.checkpoints.packs import EARLY_EXIT, Pack, open_pack
from hierspec.cli import options
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out, write_document
from hierspec.core.errors import HierspecError
from hierspec.machine import machine
from hierspec.paths import make_folder, whole_file, whole_folder
from hierspec.prompts import read_prompts, spread
from hierspec.text.tokenizer import Tokenizer
from hierspec.train.loop import Settings
from hierspec.train.material import Material, text_rows
from hierspec.train.network import Network
from hierspec.train.questions import gather_questions
from hierspec.train.recipes import Job, Result, measure_tuned, train_tuned, tuned_objective
from hierspec.train.students import draft_vocabulary
from hierspec.train.synthesise import Texts, synthesise
from hierspec.train.tuned import Exit

_HELD_ROWS = 128  # rows of text for the perplexity
_GIVEN = 0.6  # share of the conversations that start with a given question
_QUESTIONS = 3000  # per source, so that none dominates
_MEASURING = 100.0  # seconds of a call that are reserved for measuring and writing


class Run:
    """One call of the script: its clock, its files, and what earlier calls have done."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.ends = arguments, time.monotonic() + 60 * arguments.minutes
        self.work: Path = arguments.work
        make_folder(self.work)
        self.device = arguments.device
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._path = self.work / "record.json"
        self.record: dict[str, Any] = {"variants": {}}
        if self._path.is_file():
            self.record = json.loads(self._path.read_text(encoding="utf-8"))
        self.record |= {"command": command_line(), "machine": machine(), "device": self.device, "aims": AIMS}
        self.layers = options.numbers("--layers", arguments.layers)
        self.names = arguments.variants.split(",")
        if unknown := [name for name in self.names if name not in VARIANTS]:
            raise HierspecError(f"There is no variant {unknown[0]!r}: there are {', '.join(VARIANTS)}.")
        self.checkpoint: Checkpoint = load_checkpoint(arguments.model, torch.float32, pack="none")
        self.begin: Pack | None = self._begin()
        self.record["model"] = self.checkpoint.name

    def _begin(self) -> Pack | None:
        given = self.arguments.begin
        if given == "none":
            return None
        if given is None:
            return load_checkpoint(self.arguments.model, torch.float32).pack
        return open_pack(Path(given), self.checkpoint.config, self.checkpoint.weights)

    @property
    def pause_at(self) -> float:
        return self.ends - (_MEASURING if self.device.startswith("cuda") else 0.0)

    def save(self) -> None:
        """Writes everything so far, including the best pack."""
        write_document(self.record, self._path)
        if self.arguments.results is not None:
            write_document(self.record, self.arguments.results)
        best = self.record.get("best")
        if best is not None and self.arguments.best is not None:
            with whole_folder(self.arguments.best) as temporary:
                shutil.copytree(self.work / best, temporary, dirs_exist_ok=True)

    def material(self) -> Material:
        tokenizer = Tokenizer.from_folder(self.checkpoint.folder)
        chat = self._conversations(tokenizer)
        held = max(1, min(64, len(chat) // 8))
        parts = [Texts(chat.tokens[:-held], chat.answers[:-held])]
        if self.arguments.text:
            rows = text_rows(tokenizer, self.arguments.text, chat.tokens.shape[1])
            parts.append(Texts(rows, torch.zeros_like(rows, dtype=torch.bool)))
        shipped = None if self.begin is None else self.begin.draft_vocabulary()
        # Other parts of the pack were trained with its vocabulary.
        vocabulary = (
            draft_vocabulary(chat.tokens[chat.answers], self.arguments.vocabulary, self.checkpoint.config)
            if shipped is None
            else torch.from_numpy(shipped)
        )
        held_back = Texts(chat.tokens[-held:], chat.answers[-held:])
        return Material(self.checkpoint, tokenizer, self._network(), Texts.joined(parts), held_back, vocabulary)

    def _network(self, weights: Mapping[str, torch.Tensor] | None = None) -> Network:
        dtype = torch.bfloat16 if self.device.startswith("cuda") else torch.float32
        return Network(self.checkpoint.config, weights or self.checkpoint.weights).frozen(self.device, dtype)

    def _conversations(self, tokenizer: Tokenizer) -> Texts:
        """Conversations, written once by the variant that training starts from, so that they resemble what is
        measured."""
        path, arguments = self.work / "conversations.safetensors", self.arguments
        if path.is_file():
            stored = load_file(path)
            return Texts(stored["tokens"], stored["answers"])
        began, weights = time.monotonic(), self.checkpoint.weights
        if self.begin is not None and self.begin.has(EARLY_EXIT):
            weights = ChangedWeights(weights, self.begin.read(EARLY_EXIT))
        network, asked = self._network(weights), gather_questions(arguments.prompts, arguments.text, _QUESTIONS)
        parts: list[Texts] = []
        stop = min(began + 60 * arguments.write_minutes, self.ends)
        for first in range(0, arguments.conversations, arguments.write_batch):
            # Start another batch only if one of average duration would end in time.
            if parts and time.monotonic() + (time.monotonic() - began) / len(parts) > stop:
                break
            count = min(arguments.write_batch, arguments.conversations - first)
            seed = arguments.seed + first
            parts.append(synthesise(network, tokenizer, count, arguments.length, asked, seed, count, given=_GIVEN))
            print(f"{time.monotonic() - began:6.0f} s: {first + count} conversations", flush=True)
        texts = Texts.joined(parts)
        with whole_file(path) as temporary:
            save_file({"tokens": texts.tokens, "answers": texts.answers}, temporary)
        seconds = time.monotonic() - began
        self.record["text"] = {"conversations": len(texts), "length": arguments.length, "seconds": round(seconds, 1)}
        self.save()
        return texts

    def stages(self) -> bool:
        """Runs everything that is left; False if time ran out."""
        self._material = material = self.material()
        self._text = text_rows(material.tokenizer, self.arguments.held_text, self.arguments.length)[:_HELD_ROWS]
        self._asked = spread(read_prompts(self.arguments.measure), self.arguments.measured)
        self._measure_begin()
        chosen = {name: VARIANTS[name] for name in self.names}
        minutes = self.arguments.variant_minutes
        for name, variant in chosen.items():
            if not self._stage(name, variant, self.begin, minutes, self.arguments.rate, self.arguments.drift):
                return False
        name = self._best(chosen)
        if name is None or not self.arguments.final_minutes:
            return True
        config, weights = self.checkpoint.config, self.checkpoint.weights
        begin = open_pack(self.work / name, config, weights)
        rate, minutes = self.arguments.rate / 2, self.arguments.final_minutes
        drift = next_drift(self.arguments.drift, self.record["variants"][name]["reached"]["perplexity"])
        return self._stage(f"{name}-longer", chosen[name], begin, minutes, rate, drift)

    def _stage(
        self, name: str, variant: Variant, begin: Pack | None, minutes: float, rate: float, drift: float
    ) -> bool:
        """Trains and measures one variant; returns whether it is done. A failing one does not stop the others."""
        if name in self.record["variants"]:
            return True
        folder, arguments = self.work / name, self.arguments
        settings = Settings(
            arguments.steps,
            minutes,
            arguments.batch,
            rate,
            seed=arguments.seed,
            checkpoint=folder.with_name(folder.name + ".work"),
            pause_at=self.pause_at,
        )
        about: dict[str, Any] = {**asdict(variant), "rate": rate, "drift": drift}
        print(f"{name}: {json.dumps(about)}", flush=True)
        norms = options.numbers("--norm-layers", arguments.norm_layers)
        try:
            result = train_tuned(
                self._material,
                variant.exits(self.layers),
                folder,
                settings,
                drift,
                variant.ranks,
                norms,
                begin,
                self._text,
                self._asked,
                report=_report,
            )
        except (HierspecError, RuntimeError) as error:
            self.record["variants"][name] = {**about, "failed": str(error)[:500]}
            self.save()
            return True
        if not result.run.finished:
            return False
        stored = (folder / EARLY_EXIT).stat().st_size
        self.record["variants"][name] = {**about, "bytes": stored, **self._figures(result)}
        self.record["best"] = self._best()
        self.save()
        self._show(name)
        return True

    def _measure_begin(self) -> None:
        """Measures the variant that training starts from in the same way."""
        if "begin" in self.record or self.begin is None or not self.begin.has(EARLY_EXIT):
            return
        tensors, variant = self.begin.read(EARLY_EXIT), self.begin.early_exit()
        depths = {layer: variant.adapter(layer, self.checkpoint.config).config.layers for layer in variant.exits()}
        exits = [Exit(layer, depths.get(layer, 0)) for layer in self.layers]
        highest = max(len(tensor) for name, tensor in tensors.items() if name.endswith(".a"))
        norms = options.numbers("--norm-layers", self.arguments.norm_layers)
        objective = tuned_objective(self._material, exits, 1.0, (highest, highest, highest), norms, self.begin)
        job = Job(self._material, self.work, Settings(), self._asked)
        result = measure_tuned(job, objective, self._text)
        self.record["begin"] = {"bytes": stored_bytes(tensors), **self._summary(*result)}
        self.save()
        self._show("begin")

    def _figures(self, result: Result) -> dict[str, Any]:
        run = {"steps": result.run.steps, "seconds": round(result.run.seconds, 1), "log": result.run.log}
        return {**self._summary(result.figures, result.more), **run}

    def _summary(self, figures: Mapping[str, Mapping[str, float]], more: Mapping[str, float]) -> dict[str, Any]:
        low, high = (f"exit {layer}" for layer in self.layers)
        everywhere = figures["all"]
        agree, both = (everywhere[f"{low} {word} {high}"] for word in ("with", "and"))
        reached = {
            "draft": everywhere[low],
            "verifier": everywhere[high],
            "stands": round(both / max(agree, 1e-9), 4),
            "perplexity": round(more["perplexity after"] / more["perplexity before"], 4),
        }
        return {"reached": reached, "short": shortfall(reached), "agreement": figures, **more}

    def _best(self, among: Mapping[str, object] | None = None) -> str | None:
        """The variant that misses the aims by the least; among equals, the one with the better verifier."""
        trained = {name: about for name, about in self.record["variants"].items() if "reached" in about}
        names = [name for name in trained if among is None or name in among]
        order = {name: (trained[name]["short"], -trained[name]["reached"]["verifier"]) for name in names}
        return min(order, key=order.__getitem__, default=None)

    def _show(self, name: str) -> None:
        about = self.record["begin"] if name == "begin" else self.record["variants"][name]
        print(json.dumps({name: {"bytes": about["bytes"], "short": about["short"], **about["reached"]}}), flush=True)


_STARTED = time.monotonic()


def _report(step: int, loss: float, figures: dict[str, float]) -> None:
    shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    print(f"{time.monotonic() - _STARTED:7.0f} s, step {step}: loss {loss:.3f}; {shown}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a folder or a GGUF file (default: the default model)")
    add("--begin", metavar="PACK", help="continue its variant (default: the pack that ships for the model), or none")
    add("--layers", default="4,8", metavar="N,N", help="the draft exit and the verifier (default 4,8)")
    add("--norm-layers", default="2,6,12", metavar="N,N", help="more exits, with a norm alone (default 2,6,12)")
    add("--variants", default=USUAL, metavar="NAME,…", help=f"of {', '.join(VARIANTS)} (default {USUAL})")
    add(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="JSON lines: turns, question or instruction"
    )
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="text to train on, and passages to ask about")
    add("--held-text", type=Path, nargs="+", required=True, metavar="FILE", help="text for the perplexity")
    add("--measure", type=Path, required=True, metavar="FILE", help="prompts to measure with: train on others")
    add("--measured", type=int, default=120, metavar="N", help="of those prompts (default 120)")
    add("--minutes", type=float, required=True, metavar="M", help="of this call; another one goes on where it paused")
    add("--write-minutes", type=float, default=2.5, metavar="M", help="to write conversations, at most (default 2.5)")
    add("--variant-minutes", type=float, default=6.0, metavar="M", help="to train each variant (default 6)")
    add(
        "--final-minutes", type=float, default=6.0, metavar="M", help="to train the best one longer (default 6; 0: not)"
    )
    add("--conversations", type=int, default=14336, metavar="N", help="to write (default 14336)")
    add("--write-batch", type=int, default=2048, metavar="N", help="conversations at once (default 2048)")
    add("--length", type=int, default=768, metavar="N", help="tokens of each (default 768)")
    add("--vocabulary", type=int, default=8192, metavar="N", help="draft vocabulary, where --begin has none (8192)")
    add("--steps", type=int, default=1_000_000, metavar="N", help="of a variant at most (default: while time is left)")
    add("--batch", type=int, default=32, metavar="N", help="texts of a step (default 32)")
    add("--rate", type=float, default=8e-4, metavar="R", help="learning rate (default 0.0008)")
    add("--drift", type=float, default=0.08, help="nats a token that a variant may differ from the original (0.08)")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--work", type=Path, required=True, metavar="DIR", help="where it keeps what another call goes on with")
    add("--best", type=Path, metavar="DIR", help="the best pack so far")
    add("--results", type=Path, metavar="FILE", help="the record so far")


def run(arguments: argparse.Namespace) -> int:
    call = Run(arguments)
    call.record["finished"] = call.stages()
    call.save()
    short = {
        name: {key: about[key] for key in ("reached", "short", "bytes", "failed") if key in about}
        for name, about in {"begin": call.record.get("begin", {}), **call.record["variants"]}.items()
    }
    hand_out({"finished": call.record["finished"], "best": call.record.get("best"), "variants": short}, None)
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
