"""A plan: the tiers written down, as frozen dataclasses and as TOML that people read, edit and diff."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.verify import RULES

HEADS = ("auto", "shared", "adapter")
VOCABULARIES = ("auto", "full", "small")
UNTIL = ("count", "correction", "worth")


@dataclass(frozen=True)
class TierPlan:
    """A tier below the target: an exit of the target, the target without some layers, another model, or a drafter on
    the target's own states."""

    exit_layer: int | None = None  # layers of the target to run
    head: str = "auto"  # of the exit: shared (the target's own norm and head), adapter (the pack's), or what there is
    skip_layers: tuple[int, ...] = ()  # layers of the target to leave out, counted from 0
    draft: str | None = None  # a model folder, GGUF file or name; "feature" or "small" (the pack's); an EAGLE folder
    vocabulary: str = "auto"  # tokens that it scores: full, small (the pack's and the prompt's), or what there is
    weights: str | None = None  # of the draft or the adapter: auto, int8 or int4
    gather: int = 4
    until: str = "count"  # what ends a block before `gather` tokens: nothing, a correction, or what it is worth
    stores: tuple[str, ...] = ()
    budget: int = 7
    merge: bool = False
    adapt: bool = False
    candidates: int = 1
    agrees: float | None = None  # synthetic: the share of its tokens that agree with the tier above
    agrees_corrected: float | None = None  # the same of tokens that it corrects (default: as agrees)

    def __post_init__(self) -> None:
        if (self.exit_layer is not None) + (self.draft is not None) + bool(self.skip_layers) != 1:
            raise HierspecError(
                "A tier needs either exit_layer (layers of the target), skip_layers (those to leave out) or draft (a "
                "model)."
            )
        if self.exit_layer is not None and self.exit_layer < 1:
            raise HierspecError(f"exit_layer must be at least 1, not {self.exit_layer}.")
        if any(layer < 0 for layer in self.skip_layers) or len(set(self.skip_layers)) < len(self.skip_layers):
            raise HierspecError("skip_layers must be different whole numbers from 0 up.")
        if self.until not in UNTIL:
            raise HierspecError(f"until must be one of {_listed(UNTIL)}, not {self.until!r}.")
        for name in ("agrees", "agrees_corrected"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise HierspecError(f"{name} must be from 0 to 1, not {share}.")
        if self.agrees is None and self.agrees_corrected is not None:
            raise HierspecError("agrees_corrected needs agrees beside it.")
        for name, value, known in (("head", self.head, HEADS), ("vocabulary", self.vocabulary, VOCABULARIES)):
            if value not in known:
                raise HierspecError(f"Unknown {name} {value!r}{_nearest(value, known)}; choose {_listed(known)}.")
        if self.head != "auto" and self.exit_layer is None:
            raise HierspecError("head belongs to an exit: other tiers have their own.")
        if self.weights is not None and self.head == "shared":
            raise HierspecError("weights belongs to a draft or an adapter: this exit runs on the target's own weights.")
        _check_positive(self, "gather", "budget", "candidates")


@dataclass(frozen=True)
class Plan:
    """The target's own settings, then the tiers below it, nearest first. An empty plan is plain decoding."""

    model: str | None = None
    rule: str = "coupled"
    stores: tuple[str, ...] = ()
    budget: int = 7  # nodes of one proposal to the target: a pass of 8 rows with the last token before it
    merge: bool = False  # ask all stores and the tiers below, not the first that has a guess
    adapt: bool = False  # of what they guess, verify only what is worth its time by measured costs
    tiers: tuple[TierPlan, ...] = ()

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise HierspecError(f"Unknown rule {self.rule!r}{_nearest(self.rule, RULES)}; rules are {_listed(RULES)}.")
        _check_positive(self, "budget")
        if self.synthetic and self.rule != "coupled":
            raise HierspecError("agrees works under the rule coupled only: a synthetic tier has no law to hand up.")
        real = next((place for place, tier in enumerate(self.tiers) if tier.agrees is None), len(self.tiers))
        if any(tier.agrees is not None for tier in self.tiers[real:]):
            raise HierspecError(
                f"A tier below tier {real + 1} has agrees and tier {real + 1} has not; give it to every tier above too."
            )

    @property
    def weighs(self) -> bool:
        """Whether some tier weighs time, so that what passes cost must be known."""
        return any(tier.until == "worth" for tier in self.tiers)

    @property
    def synthetic(self) -> bool:
        """Whether some tier only plays how often it agrees: what is measured then is no model's own speed."""
        return any(tier.agrees is not None for tier in self.tiers)

    @staticmethod
    def named(name: str, layers: int, early_exit: int | None = None) -> Plan:
        """One of the well-known plans, for a target of this many layers and, where it says so, with this exit."""
        if name not in NAMED:
            known = ("auto", *NAMED)  # which only a model can tell
            raise HierspecError(
                f"There is no plan or plan file {name!r}{_nearest(name, known)}; plans are {_listed(known)}, or give a "
                "TOML file."
            )
        plan = NAMED[name](layers)
        if name.startswith("layerskip") and early_exit is not None:
            return replace(plan, tiers=(replace(plan.tiers[0], exit_layer=early_exit),))
        return plan

    @staticmethod
    def read(path: str | Path) -> Plan:
        try:
            return Plan.from_toml(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise HierspecError(f"The plan file {path} cannot be read ({error}).") from error
        except HierspecError as error:
            raise HierspecError(f"{path}: {error}") from error

    @staticmethod
    def from_toml(text: str) -> Plan:
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise HierspecError(f"The plan is not valid TOML: {error}.") from error
        tiers = table.pop("tier", [])
        if not isinstance(tiers, list) or not all(isinstance(tier, dict) for tier in tiers):
            raise HierspecError("Tiers are written as [[tier]], with double brackets.")
        return Plan(
            **_checked(Plan, table, "plan", leave_out="tiers", also="tier"),
            tiers=tuple(_tier(number, tier) for number, tier in enumerate(tiers, 1)),
        )

    def to_toml(self) -> str:
        parts = [_table(self, leave_out="tiers")]
        parts += ["[[tier]]\n" + _table(tier) for tier in self.tiers]
        return "\n".join(part for part in parts if part)


# Depths as in the papers: LayerSkip and HiSpec draft near 1/8 of the model, HiSpec's verifier stands near 1/4.
NAMED = {
    "plain": lambda layers: Plan(),
    # Token databases. PLD copies one chain from the text so far; what is verified follows the measured costs.
    "lookup": lambda layers: Plan(stores=("copy",), budget=12, adapt=True),
    # 7 candidates of 4 tokens, and a window of 7 x 4 that makes new ones in the same pass.
    "lookahead": lambda layers: Plan(stores=("lookahead",), budget=60),
    "rest": lambda layers: Plan(stores=("corpus",), budget=64),
    "hd": lambda layers: Plan(stores=("lookahead", "history", "corpus?"), budget=60, merge=True),
    "hd+": lambda layers: Plan(stores=("context", "history", "corpus?"), budget=24, merge=True, adapt=True),
    # Exits of the model itself.
    "layerskip": lambda layers: Plan(tiers=(TierPlan(exit_layer=max(1, round(layers / 8)), gather=4),)),
    # The same exit; how many tokens it gathers follows what was learnt and measured.
    "layerskip+": lambda layers: Plan(
        budget=12, adapt=True, tiers=(TierPlan(exit_layer=max(1, round(layers / 8)), gather=8, until="worth"),)
    ),
    "hispec": lambda layers: Plan(
        tiers=(
            TierPlan(exit_layer=min(layers, max(2, round(layers / 4))), gather=4),
            TierPlan(exit_layer=max(1, round(layers / 8)), gather=2),
        )
    ),
    # The same exits; how many tokens they gather, and which of them are asked, follows what was learnt and measured.
    "hispec+": lambda layers: Plan(
        budget=12,
        adapt=True,
        tiers=(
            TierPlan(exit_layer=min(layers, max(2, round(layers / 4))), gather=8, until="worth"),
            TierPlan(exit_layer=max(1, round(layers / 8)), gather=4, until="worth"),
        ),
    ),
    # What a pack adds. The best single draft, which reads the model's own states.
    "draft": lambda layers: Plan(budget=12, adapt=True, tiers=(TierPlan(draft="feature", gather=8, until="worth"),)),
    # The same as a tree: the two next best of each token hang beside it as leaves.
    "eagle": lambda layers: Plan(
        budget=12, adapt=True, tiers=(TierPlan(draft="feature", gather=6, until="worth", candidates=3),)
    ),
    # Everything together: stores, and the drafter where it brings more than they do.
    "eagle+": lambda layers: Plan(
        stores=("context", "history", "corpus?"),
        budget=24,
        merge=True,
        adapt=True,
        tiers=(TierPlan(draft="feature", gather=8, until="worth", candidates=2),),
    ),
    # A ladder of draft models in the paper's fixed blocks, the better draft above.
    "hsd": lambda layers: Plan(tiers=(TierPlan(draft="feature", gather=4), TierPlan(draft="small", gather=2))),
}


_IN_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple[str, ...]": "a list of strings",
    "tuple[int, ...]": "a list of whole numbers",
}


def _tier(number: int, table: dict[str, Any]) -> TierPlan:
    values = _checked(TierPlan, table, f"tier {number}")
    try:
        return TierPlan(**values)
    except HierspecError as error:
        raise HierspecError(f"Tier {number}: {error}") from error


def _checked(kind: type, table: dict[str, Any], where: str, leave_out: str = "", also: str = "") -> dict[str, Any]:
    """The table's values for a dataclass; a wrong key or type is named, with the nearest right key."""
    kinds = {f.name: str(f.type) for f in fields(kind) if f.name != leave_out}
    values = {}
    for key, value in table.items():
        if key not in kinds:
            names = [*kinds, also] if also else list(kinds)
            raise HierspecError(f"Unknown key {key!r} in the {where}{_nearest(key, names)}; keys are {_listed(names)}.")
        wanted = kinds[key].removesuffix(" | None")
        if wanted.startswith("tuple"):
            item_kind = "int" if "int" in wanted else "str"
            good = isinstance(value, list) and all(type(item).__name__ == item_kind for item in value)
            value = tuple(value) if good else value
        elif wanted == "float" and type(value) is int:
            good, value = True, float(value)
        else:
            good = type(value).__name__ == wanted
        if not good:
            raise HierspecError(f"{key} in the {where} must be {_IN_WORDS[wanted]}, not {value!r}.")
        values[key] = value
    return values


def _table(item: Plan | TierPlan, leave_out: str = "") -> str:
    """Only what differs from the defaults, so that a plan file says what matters."""
    lines = []
    for f in fields(item):
        value = getattr(item, f.name)
        if f.name != leave_out and (value != f.default or f.name in ("rule", "gather")):
            written = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
            # JSON's strings are TOML's, but for JSON's surrogate pairs (not made here) and a bare DEL.
            lines.append(f"{f.name} = {written}\n".replace("\x7f", "\\u007f"))
    return "".join(lines)


def _check_positive(item: object, *names: str) -> None:
    for name in names:
        if getattr(item, name) < 1:
            raise HierspecError(f"{name} must be at least 1, not {getattr(item, name)}.")


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
