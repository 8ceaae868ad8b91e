"""The plan `auto`: what `hierspec plan` found for this model on this machine, else all that there is for the model.

Whichever it is, how much is guessed, by whom and whether at all is decided anew at every pass from what was measured
and learnt (`core/appraisal.py`, `core/policy.py`). So a plan that does not suit a text or a load costs little.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.packs import FEATURE, Pack
from hierspec.core.plan import Plan, TierPlan
from hierspec.kept import KeptFile

AUTO = "auto"
_VERSION = 1  # count up when plans found before should be found anew


def usual_plan(config: DecoderConfig, pack: Pack | None) -> Plan:
    """Stores, and beside them the best drafter that the model has."""
    tiers: tuple[TierPlan, ...] = ()
    if pack is not None and pack.has(FEATURE):
        tiers = (TierPlan(draft="feature", gather=8, until="worth", candidates=2),)
    elif pack is not None and pack.exits():
        tiers = (TierPlan(exit_layer=pack.exits()[0], gather=8, until="worth"),)
    elif config.early_exit is not None:
        tiers = (TierPlan(exit_layer=config.early_exit, gather=8, until="worth"),)
    return beside_stores(tiers, config.layers)


def beside_stores(tiers: tuple[TierPlan, ...], layers: int) -> Plan:
    """These tiers of a model of so many layers, and all stores beside them."""
    return replace(Plan.named("hd+", layers), tiers=tiers)


def noted(plan: Plan, note: str) -> str:
    """A plan file that begins with a note."""
    return "".join(f"# {line}\n" for line in note.splitlines()) + plan.to_toml()


def kept_plan(about: tuple[str, ...]) -> Plan | None:
    """The plan that was found for a model on this machine, if any. `about` tells the model from others."""
    return _file(about).read(Plan.from_toml)


def keep_plan(plan: Plan, about: tuple[str, ...], note: str = "") -> Path:
    """Let `auto` be this plan for this model on this machine."""
    file = _file(about)
    file.write(noted(plan, note))
    return file.path


def _file(about: tuple[str, ...]) -> KeptFile:
    return KeptFile.here("plans", about, _VERSION, name="{key}.toml")
