"""Ctrl-C and failed allocations at chosen places, and models small enough to try thousands of them."""

from __future__ import annotations

import inspect
import linecache
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch.nn import functional

import hierspec
from hierspec.assembly.measured_costs import CostBook
from hierspec.assembly.paces import PaceBook
from hierspec.core.engine import Engine
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.equality import first_difference
from hierspec.language_model import LanguageModel, PlanLike
from hierspec.pacing.costs import Costs, Prefill
from hierspec.scorers.base import StateScorer
from hierspec.scorers.pool import StaircasePool
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeStore
from hierspec.testing.packs import tiny_pack

SOURCES = str(Path(hierspec.__file__).parent)
PLANS: dict[str, PlanLike] = {
    **{name: name for name in ("plain", "lookup", "lookahead", "layerskip", "draft", "eagle", "hd+", "auto")},
    "trees": Plan(stores=("trees",), budget=12),
    "two tiers": Plan(tiers=(TierPlan(exit_layer=2, gather=3), TierPlan(draft="small", gather=2))),
    "residual": Plan(rule="residual", tiers=(TierPlan(exit_layer=1, gather=3, candidates=2),)),
}


# Ctrl-C.


class Lines:
    """Counts the lines of hierspec that an action runs; Ctrl-C comes before line number `at`, and, where `again` is
    given, once more after so many calls."""

    def __init__(self, at: int, again: int = 0) -> None:
        self.count = 0
        self.hits: list[str] = []
        self._at, self._again = at, again

    def run(self, action: Callable[[], object]) -> None:
        sys.settrace(self._enter)
        try:
            action()
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def _call(self, frame, event, argument):
        """Python stops tracing lines once that has raised something; calls it still tells.

        What a profiler raises where a generator goes on ends it without its `finally` and `with`. Ctrl-C does not:
        Python looks for signals inside the generator. So those calls are left out.
        """
        goes_on = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event in ("call", "c_return") and not goes_on and frame.f_code.co_filename.startswith(SOURCES):
            self._again -= 1
            if self._again == 0:
                sys.setprofile(None)
                self._hit(frame)

    def _hit(self, frame) -> NoReturn:
        self.hits.append(f"{frame.f_code.co_filename.removeprefix(SOURCES)}:{frame.f_lineno}")
        raise KeyboardInterrupt

    def _enter(self, frame, event, argument):
        file = frame.f_code.co_filename
        if not file.startswith(SOURCES) or "/testing/" in file:
            return None
        previous = frame.f_lineno  # of a generator that goes on: where it stopped

        def line(frame, event, argument):
            nonlocal previous
            if event == "line":
                # Python looks for signals after calls. So Ctrl-C comes neither between the body of a `with`, whose line
                # is told again when it is left, and its exit, nor before the `try` that begins such a body.
                text = linecache.getline(file, frame.f_lineno).lstrip()
                spared = text.startswith("try:") or (frame.f_lineno < previous and text.startswith("with "))
                previous = frame.f_lineno
                if not spared:
                    self.count += 1
                    if self.count == self._at:
                        if self._again:
                            sys.setprofile(self._call)
                        self._hit(frame)
            return line

        return line


# Allocations.

_ALLOCATING = (
    (np, "empty zeros full array asarray concatenate append arange flatnonzero unique bincount require"),
    (torch, "empty zeros full cat stack as_tensor tensor from_numpy arange where zeros_like"),
    (functional, "linear embedding rms_norm silu scaled_dot_product_attention"),
)


class Allocations:
    """Counts the arrays that hierspec asks numpy and torch for; the one number `at` is refused."""

    def __init__(self, at: int = 0) -> None:
        self.count, self.hit, self._at = 0, "", at

    @contextmanager
    def watched(self) -> Iterator[None]:
        real = [(module, name, getattr(module, name)) for module, names in _ALLOCATING for name in names.split()]
        try:
            for module, name, function in real:
                setattr(module, name, self._counted(module, function))
            yield
        finally:
            for module, name, function in real:
                setattr(module, name, function)

    def _counted(self, module, function):
        def allocate(*arguments, **named):
            frame = sys._getframe(1)
            if frame.f_code.co_filename.startswith(SOURCES):
                self.count += 1
                if self.count == self._at:
                    self.hit = f"{frame.f_code.co_filename.removeprefix(SOURCES)}:{frame.f_lineno}"
                    raise _refusal(module, self._at)
            return function(*arguments, **named)

        return allocate


def _refusal(module, number: int) -> Exception:
    if module is np:
        return MemoryError("Unable to allocate 1.00 GiB for an array")
    if number % 2:
        return RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory")
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


# What they come into.


@dataclass
class Subject:
    """A model that faults come into, and one of the same weights that never sees any."""

    name: str
    model: LanguageModel
    reference: LanguageModel
    sizes: dict[object, int] = field(default_factory=dict)  # lines or allocations of an action, by what it is

    def plain(self, prompt: list[int], sampling: Sampling) -> tuple[int, ...]:
        self.reference.forget()
        return self.reference.generate(prompt, plan="plain", sampling=sampling).tokens

    def same(self, prompt: list[int], sampling: Sampling, one, other) -> bool:
        """Whether two texts are the same; where a row's bits depend on its pass, ties may fall either way."""
        assert sampling.seed is not None
        difference = first_difference(self.reference, prompt, list(one), list(other), sampling, sampling.seed)
        return difference is None or (not self.model.decoder.backend.exact and difference.is_tie)

    def pools(self) -> list[StaircasePool]:
        assembler = self.model.assembler
        catalogues = assembler._catalogues()
        layers = [layer.pool for catalogue in catalogues for layer in catalogue._layers()]
        return [*(catalogue.pool for catalogue in catalogues), *layers]

    def unbalanced(self, forget: bool) -> str:
        """What is wrong with the counts of pages; nothing where all is well. `forget` must free every page."""
        if forget:
            self.model.forget()
        for pool in self.pools():
            held = {int(page) for staircase in pool.staircases() for page in staircase.table}
            pages = pool._pages
            if pages is None or pool._changing:  # half done: dropped before the next change
                continue
            if pages.in_use != len(held) or (forget and pages.free != pages.memory.pages):
                return f"{pages.in_use} pages count as used, {len(held)} are"
        return ""


def subjects(folder: Path, most: int = 4) -> list[Subject]:
    """Checkpoints of several kinds on both backends, with little room for KV caches."""
    made = []
    for name, family, backend, options, changes in (
        ("llama, compiled", "llama", "compiled", {}, {}),
        ("llama, torch", "llama", "torch", {}, {}),
        ("qwen3, compiled, int8", "qwen3", "compiled", {"weights": "int8"}, {}),
        ("mistral, torch", "mistral", "torch", {}, {"windows": (40,) * 3}),
    )[:most]:
        path = folder / family
        if not path.exists():
            changes = {"layers": 3, "intermediate": 128, "eos_ids": (), **changes}
            tiny_checkpoint(path, family, **changes)
            tiny_pack(folder / f"{family}-pack", path, exits=(1, 2), taps=(1,))
        stores = folder / f"{name} stores"
        before = torch.get_num_threads()
        torch.set_num_threads(1 + (name == "qwen3, compiled, int8"))  # a team of two there: its barriers can break
        loaded = [
            hierspec.load(
                path, backend=backend, dtype="float32", device="cpu", pack=folder / f"{family}-pack",
                kv_memory=memory, stores=stores / str(memory), **options
            )
            for memory in (1 << 20, 1 << 26)
        ]  # fmt: skip
        torch.set_num_threads(before)
        for model in loaded:
            model.assembler.costs = _FixedCosts()
            model.assembler._paces = PaceBook(model.assembler.costs)
        subject = Subject(name, *loaded)
        subject.model.add_store(FakeStore("trees", _trees))
        made.append(subject)
    return made


class _FixedCosts(CostBook):
    """No clock decides what is attacked."""

    def costs(self, scorer: StateScorer, computed_layers: int = 0) -> Costs:
        return Costs((1, 32), (1e-3, 4e-3))

    def prefill(self, scorer: StateScorer) -> Prefill:
        return Prefill(1e-4)


def _trees(context: np.ndarray, budget: int) -> Proposal:
    """Two siblings at each of three positions, from what follows the last token in the text, wrong before right."""
    where = np.flatnonzero(context[:-1] == context[-1])
    following = context[where[-1] + 1 :][:3].tolist() if len(where) else []
    tokens: list[int] = []
    parents: list[int] = []
    for token in following:
        parent = len(tokens) - 1 if tokens else -1
        tokens += [(token + 1) % 256, token]
        parents += [parent, parent]
    return Proposal(tuple(tokens), tuple(parents))


_BEGINNINGS = [[random.Random(number).randrange(3, 259) for _ in range(70)] for number in range(3)]


def a_prompt(rng: random.Random) -> list[int]:
    """Some begin alike, and most repeat themselves."""
    beginning = rng.choice(_BEGINNINGS)[: rng.choice([1, 5, 60, 64, 70])]
    phrase = [rng.randrange(3, 259) for _ in range(rng.randrange(1, 8))]
    return [*beginning, *phrase, *phrase, *phrase[: rng.randrange(len(phrase) + 1)]]


def a_sampling(rng: random.Random, plan: str) -> Sampling:
    # Under the residual rule only greedy texts are plain decoding's to the token.
    temperature = rng.choice([0.0, 0.9]) if plan != "residual" else 0.0
    return Sampling(max_tokens=rng.randrange(3, 9), temperature=temperature, seed=rng.randrange(1000))


def write(requests: list[Request]) -> None:
    for _ in Engine().run(requests):
        pass
