"""The plan `auto`: what `hierspec plan` chose for this model on this machine, else stores and the model's best drafter.

Either way every pass decides again how much is drafted, by whom and whether at all, from measured costs and from what
was accepted so far (`pacing/`). So a plan that does not suit a text or a load costs little.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hierspec.cache import CHOSEN_FOR
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.packs import FEATURE, Pack
from hierspec.core.plan import Plan, TierPlan
from hierspec.kept import KeptFile

AUTO = "auto"
_GPU_BUDGET = 31  # draft nodes of a pass: with the last context token that makes 32 rows, as CUDA graphs have
_VERSION = 1  # increase when saved plans should be chosen again


def default_plan(config: DecoderConfig, pack: Pack | None, device: str = "cpu") -> Plan:
    """Stores, and beside them the best drafter that the model has.

    On a GPU further rows of a pass cost next to nothing, so the plan drafts more of them.
    """
    on_gpu = device == "cuda"
    tiers: tuple[TierPlan, ...] = ()
    if pack is not None and pack.has(FEATURE):
        tiers = (TierPlan(draft="feature", gather=8, until="worth", candidates=4 if on_gpu else 2),)
    elif pack is not None and pack.exits():
        tiers = (TierPlan(exit_layer=pack.exits()[0], gather=8, until="worth"),)
    elif config.early_exit is not None:
        tiers = (TierPlan(exit_layer=config.early_exit, gather=8, until="worth"),)
    plan = beside_stores(tiers, config.layers)
    return replace(plan, budget=_GPU_BUDGET) if on_gpu else plan


def beside_stores(tiers: tuple[TierPlan, ...], layers: int) -> Plan:
    """These tiers, for a model of this many layers, with all stores beside them."""
    return replace(Plan.named("hd+", layers), tiers=tiers)


def with_note(plan: Plan, note: str) -> str:
    """A plan file that begins with a comment."""
    return "".join(f"# {line}\n" for line in note.splitlines()) + plan.to_toml()


class AutoPlan:
    """What `auto` means for a model, asked for with every request: another process may save a plan meanwhile."""

    def __init__(self, about: tuple[str, ...], default: Plan) -> None:
        self._file, self._default = _file(about), default

    @property
    def plan(self) -> Plan:
        return self._file.read(Plan.from_toml) or self._default


def saved_plan(about: tuple[str, ...]) -> Plan | None:
    """The plan that was chosen for a model on this machine, if any. `about` identifies the model."""
    return _file(about).read(Plan.from_toml)


def save_plan(plan: Plan, about: tuple[str, ...], note: str = "") -> Path:
    """Make `auto` mean this plan for this model on this machine."""
    file = _file(about)
    file.write(with_note(plan, f"{CHOSEN_FOR}{about[1]}\n{note}"))
    return file.path


def saved_plan_file(about: tuple[str, ...]) -> Path:
    """Where the plan that was chosen for a model on this machine is, if there is one."""
    return _file(about).path


def forget_plan(about: tuple[str, ...]) -> bool:
    """Undo `save_plan`. Returns whether a plan was saved."""
    path = saved_plan_file(about)
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def _file(about: tuple[str, ...]) -> KeptFile:
    return KeptFile.here("plans", about, _VERSION, name="{key}.toml")
