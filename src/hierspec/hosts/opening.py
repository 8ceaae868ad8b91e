"""Opens what drafts for a host's model: stores and draft models under the plan that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from hierspec.assembly.assembler import Assembler
from hierspec.assembly.drafts import LoadOptions
from hierspec.assembly.learnt import Learnt
from hierspec.assembly.vocabulary import Vocabulary
from hierspec.checkpoints.load import Checkpoint, load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.hosts.cores import on_all_cores
from hierspec.hosts.guest import Guest
from hierspec.hosts.host_costs import HostCostBook
from hierspec.hosts.host_pace import HostPace
from hierspec.hosts.vllm_options import GuestOptions, read_plan
from hierspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class HostModel:
    """The target as its host runs it."""

    name: str
    folder: Path  # of its tokenizer
    weights: str  # a folder, a file or a hub name, as the host was given it
    layers: int
    vocabulary: int
    context: int  # tokens of a text at most
    device: str = "cpu"  # where draft models run
    timed: bool = True  # whether the time between two calls is that of one step


def open_guest(model: HostModel, options: GuestOptions, most: int, clock: Callable[[], float] = perf_counter) -> Guest:
    """The guest for a host's model, which drafts at most `most` tokens per row."""
    plan = read_plan(options.plan, model.layers)
    vocabulary = Vocabulary(model.name, Tokenizer.from_folder(model.folder), model.vocabulary)
    load, pace = LoadOptions(device=model.device), HostPace(most, plan.adapt and model.timed, clock)
    costs = HostCostBook(pace.costs, model.name, load.dtype, load.weights)
    target = _readable(model, options.pack)
    prior = None if target is None or target.pack is None else target.pack.learnt()
    learnt = Learnt((model.name, model.weights, "host"), prior)
    assembler = Assembler(vocabulary, load, None, options.stores, costs, learnt, hosted=target)
    with on_all_cores():
        return Guest(assembler, plan, pace, model.context, options.namespace)


def _readable(model: HostModel, pack: str | None) -> Checkpoint | None:
    """The host's model with its pack; nothing of it is computed.

    None if the host runs a model that cannot be read here, unless a pack was named for it: then it raises.
    """
    try:
        return load_checkpoint(model.weights, pack=pack)
    except (HierspecError, OSError):
        if pack is not None:
            raise
        return None
