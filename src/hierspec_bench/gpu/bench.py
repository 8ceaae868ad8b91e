"""The whole run on a GPU: parts in order of importance, each with its share of the time.

A part that takes less leaves the rest to the parts after it. A part that fails records the reason, and the next one
begins. Results are written after every part, so that a run that is cut off keeps them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.language_model import LanguageModel
from hierspec.machine import machine
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt, spread
from hierspec_bench.document import document_of
from hierspec_bench.gpu.engines import USUAL_ENGINES, gpu_engines, open_peers, token_times
from hierspec_bench.gpu.roofline import roofline
from hierspec_bench.gpu.shape_passes import CONTEXTS, WIDTHS, measure_shape
from hierspec_bench.gpu.timing import Deadline
from hierspec_bench.provenance import bandwidth, provenance, versions
from hierspec_bench.run import SideBySide

AUTO = "auto"
PARTS = ("roofline", "passes", "plans", "batches", "engines")
_WARM_UP = 6  # prompts of different tasks answered before timing starts: they record passes of many widths
_LAPS, _PREPARING = 4, 0.02  # at most this many warm-up rounds per batch, until preparing takes less than this share
_ERROR_LETTERS = 500


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    device: torch.device
    seconds: float
    prompts: Sequence[BenchPrompt]
    plans: Sequence[str]
    sizes: Sequence[str] = ("", "8B")  # of the model: "" as it is, others enlarged
    temperatures: Sequence[float] = (0.0, 1.0)
    batches: Sequence[int] = (1, 4, 16, 64)
    max_tokens: int = 128
    shapes: Sequence[str] = ("default", "8B")
    contexts: Sequence[int] = CONTEXTS
    widths: Sequence[int] = WIDTHS
    engines: Sequence[str] = USUAL_ENGINES
    engine_python: str = ""  # a Python that can import them; "": this one
    parts: Sequence[str] = PARTS

    @property
    def format(self) -> str:
        return "bfloat16" if self.device.type == "cuda" else "float32"


@dataclass
class _Part:
    title: str
    weight: float  # share of the time, relative to the other parts
    least: float  # share of the total time: with less left, the part is not started
    measure: Callable[[Deadline], bool]  # returns whether it was completed


@dataclass
class GpuBench:
    """`load` opens the model at a size. `document` holds the results so far."""

    settings: Settings
    load: Callable[[str], LanguageModel]
    about: Mapping[str, Any]  # first keys of the record, such as the command
    document: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._models: dict[str, LanguageModel] = {}
        self.document = {
            "kind": "gpu",
            "version": 1,
            "complete": False,
            **self.about,
            "machine": machine(),
            "versions": versions(),
            "seconds": self.settings.seconds,
            "passes": [],
            "runs": [],
            "batches": [],
            "engines": [],
            "parts": [],
        }

    def run(self, progress: Progress = silent, measured: Callable[[], None] = lambda: None) -> None:
        """Runs all parts; calls `measured` after each."""
        parts = list(self._parts())
        whole, complete = Deadline(self.settings.seconds), True
        for number, part in enumerate(parts):
            progress(part.title, number, len(parts))
            share = part.weight / sum(other.weight for other in parts[number:])
            deadline = whole.until(share * whole.left)
            began = time.perf_counter()
            row: dict[str, Any] = {"part": part.title}
            if whole.left < part.least * self.settings.seconds:
                row["left_out"] = "There was no time left."
            else:
                try:
                    row["complete"] = part.measure(deadline)
                except Exception as error:  # a failing part must not stop the others
                    row["error"] = f"{type(error).__name__}: {error}"[:_ERROR_LETTERS]
            row["seconds"] = round(time.perf_counter() - began, 1)
            complete = complete and bool(row.get("complete"))
            self.document["parts"].append(row)
            measured()
            gc.collect()  # frees the weights of measured shapes
            if self.settings.device.type == "cuda":
                torch.cuda.empty_cache()
        self.document["complete"] = complete
        progress("Measured", len(parts), len(parts))
        measured()

    @property
    def different(self) -> bool:
        """Whether a plan that promises plain decoding's text wrote a different one."""
        for run in (*self.document["runs"], *self.document["batches"]):
            for figures in run["plans"].values():
                if figures["promises_text"] and figures["prompts"] > figures["identical"] + figures["ties"]:
                    return True
        return False

    def _parts(self) -> Iterator[_Part]:
        """The requested parts."""
        for part in self._all_parts():
            if part.title.split(",")[0] in self.settings.parts:
                yield part

    def _all_parts(self) -> Iterator[_Part]:
        settings = self.settings
        yield _Part("roofline", 1, 0.0, self._roofline)
        for shape in settings.shapes:
            yield _Part(f"passes, {shape}", 8, 0.03, partial(self._passes, shape))
        for number, temperature in enumerate(settings.temperatures):
            for size in settings.sizes:
                title = f"plans, {_named(size)}, temperature {temperature:g}"
                weight = (18 if size else 12) / (number + 1)  # the first temperature is the one that others compare
                yield _Part(title, weight, 0.03, partial(self._plans, size, temperature))
        for size in settings.sizes if settings.batches else ():
            # It cannot be stopped half way.
            yield _Part(f"batches, {_named(size)}", 8 if size else 4, 0.08, partial(self._batches, size))
        for size in settings.sizes if settings.engines else ():
            # The first size compiles longest.
            yield _Part(f"engines, {_named(size)}", 6 if size else 10, 0.05, partial(self._engines, size))

    def _roofline(self, deadline: Deadline) -> bool:
        self.document["roofline"] = roofline(self.settings.device)
        return True

    def _passes(self, shape: str, deadline: Deadline) -> bool:
        settings, before = self.settings, len(self.document["passes"])
        for result in measure_shape(
            shape, settings.device, settings.format, settings.contexts, deadline, settings.widths
        ):
            self.document["passes"].append(result)
        return len(self.document["passes"]) - before == len(settings.contexts)

    def _plans(self, size: str, temperature: float, deadline: Deadline) -> bool:
        model = self._model(size)
        plans, absent = self._usable_plans(model)
        sampling = Sampling(max_tokens=self.settings.max_tokens, temperature=temperature, seed=0)
        for prompt in spread(self.settings.prompts, _WARM_UP):
            for plan in plans.values():
                model.apart().generate(prompt.turns[0], plan=plan, sampling=sampling)
        bench = SideBySide(model, self.settings.prompts, plans, [sampling])
        return self._run("runs", bench, {"absent_plans": absent}, deadline)

    def _batches(self, size: str, deadline: Deadline) -> bool:
        model = self._model(size)
        plans, _ = self._usable_plans(model, (AUTO,))
        sizes = [batch for batch in self.settings.batches if batch > 1]
        prompts, sampling = self._batch_prompts(), self._batch_sampling
        for batch in self.settings.batches:
            for plan in (Plan(), *plans.values()):
                _warm_up(model, [each.turns[0] for each in prompts[:batch]], plan, sampling)
        bench = SideBySide(model, prompts, plans, [sampling], batches=sizes)
        return self._run("batches", bench, {}, deadline)

    def _batch_prompts(self) -> list[BenchPrompt]:
        """As many prompts as the largest batch holds, one turn each.

        If there are fewer, they come again with a number: the same prompt's answer would be drafted from history.
        """
        chosen = []
        for number in range(max(self.settings.batches, default=0)):
            before, index = divmod(number, len(self.settings.prompts))
            prompt = self.settings.prompts[index]
            text = f"{prompt.turns[0]} ({before + 1})" if before else prompt.turns[0]
            chosen.append(replace(prompt, turns=(text,)))
        return chosen

    @property
    def _batch_sampling(self) -> Sampling:
        return Sampling(max_tokens=self.settings.max_tokens, seed=0)

    def _run(self, key: str, bench: SideBySide, about: Mapping[str, Any], deadline: Deadline) -> bool:
        bench.run(over=lambda: deadline.over)
        if bench.done:
            whole = document_of(bench, self._about(bench.model, bench.plans) | dict(about))
            del whole["texts"], whole["machine"]  # long, and recorded once above
            self.document[key].append(whole)
        return bench.done == bench.total

    def _engines(self, size: str, deadline: Deadline) -> bool:
        settings, model, rows = self.settings, self._model(size), self.document["engines"]
        engines = gpu_engines(settings.engines, settings.device, settings.format, settings.engine_python)
        if size:  # no file has these weights: random weights of this size cost the same
            for row in token_times(engines, model.config, settings.contexts, settings.batches, deadline):
                rows.append({"model": model.name, **row})
            return not deadline.over
        peers, absent = open_peers(engines, model, deadline)
        try:
            sampling = Sampling(max_tokens=settings.max_tokens, seed=0)
            bench = SideBySide(model, settings.prompts, {}, [sampling], peers)
            complete = self._run("runs", bench, {"absent_engines": absent}, deadline)
            asked = [model.encode(prompt.turns[0]) for prompt in self._batch_prompts()]
            for peer in peers:
                if engines[peer.name].batches and peer.name not in bench.failed:
                    for batch in settings.batches:
                        row = peer.together(asked[:batch], self._batch_sampling.max_tokens)
                        rows.append({"model": model.name, **row})
            return complete
        finally:
            for peer in peers:
                peer.close()

    def _model(self, size: str) -> LanguageModel:
        if size not in self._models:
            self._models[size] = self.load(size)
        return self._models[size]

    def _usable_plans(
        self, model: LanguageModel, names: Sequence[str] | None = None
    ) -> tuple[dict[str, Plan], dict[str, str]]:
        """Plans that this model can run, and why others cannot: some need a pack or a corpus."""
        plans, absent = {}, {}
        for name in self.settings.plans if names is None else names:
            try:
                plan = model.plan(name)
                model.hierarchy(plan)
                plans[name] = plan
            except HierspecError as error:
                absent[name] = str(error)
        return plans, absent

    def _about(self, model: LanguageModel, plans: Mapping[str, Plan]) -> dict[str, Any]:
        return {
            "model": model.name,
            "enlarged": model.enlarged,
            "dtype": model.dtype,
            "weights": model.weights,
            "decoder": type(model.decoder).__name__,
            "products": model.decoder.products,
            **provenance(model, plans.values()),
            "bandwidth": bandwidth(model),
        }


def _warm_up(model: LanguageModel, texts: Sequence[str], plan: Plan, sampling: Sampling) -> None:
    """Answers a batch until preparing takes little time: other engines prepare everything at startup."""
    backend = model.decoder.backend
    for _ in range(_LAPS):
        began, prepared = time.perf_counter(), backend.preparing
        model.apart().generate_many(texts, plan=plan, sampling=sampling)
        if backend.preparing - prepared < _PREPARING * (time.perf_counter() - began):
            return


def _named(size: str) -> str:
    return f"enlarged to {size}" if size else "the model"
