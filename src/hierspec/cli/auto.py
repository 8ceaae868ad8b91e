"""What the plan `auto` is for a model on this machine, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hierspec.core.plan import Plan

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel

SAVED, USUAL = "saved", "default"


def source_of_auto(model: LanguageModel) -> str:
    """Whether `hierspec plan --save` chose what `auto` is, or it is what every such model gets."""
    from hierspec.assembly.auto import saved_plan

    return USUAL if saved_plan(model.about) is None else SAVED


def plan_in_words(model: LanguageModel, name: str, plan: Plan) -> list[str]:
    """The plan that a name means here, as lines: where it is from, then its TOML."""
    about = ""
    if name == "auto":
        chosen = source_of_auto(model) == SAVED
        about = ", as hierspec plan --save chose it" if chosen else ", as it is without hierspec plan --save"
    toml = plan.to_toml().strip().splitlines()
    return [f"plan {name}{about}:", *(f"  {line}" if line else "" for line in toml or ["(plain decoding)"])]
