"""A plan: the tiers written down, as frozen dataclasses and as TOML that people read, edit and diff."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_text, shown, shown_path, toml_table
from hierspec.core.verify import RULES

HEADS = ("auto", "shared", "adapter")
VOCABULARIES = ("auto", "full", "small")
UNTIL = ("count", "correction", "unsure", "worth")
# The plans that ship, in the order in which they are listed: <name>.toml in _SHIPPED.
NAMED = (
    "plain",
    "lookup",
    "lookup-fixed",
    "lookahead",
    "rest",
    "hd",
    "hd+",
    "layerskip",
    "layerskip+",
    "adadecode",
    "hispec",
    "hispec+",
    "draft",
    "eagle",
    "eagle+",
    "hsd",
    "hsd-residual",
)
_SHIPPED = Path(__file__).parents[1] / "plans"
_LARGEST_FILE = 1 << 20  # bytes; plans take hundreds
_LARGEST_COUNT = 1_000_000  # tokens, nodes or layers; no draft is that long
_MOST_TIERS = 64


@dataclass(frozen=True, repr=False)
class TierPlan:
    """A tier below the target.

    It is an exit of the target, the target without some layers, another model, or a drafter on the target's states.
    """

    exit_layer: int | None = None  # layers of the target to run
    exit_depth: float | None = field(default=None, kw_only=True)  # the same as a share of the target's layers
    early_exit: bool = field(default=False, kw_only=True)  # the checkpoint's own early exit, where it names one
    head: str = "auto"  # of the exit: shared (the target's own norm and head), adapter (the pack's), or auto
    skip_layers: tuple[int, ...] = ()  # layers of the target to leave out, counted from 0
    draft: str | None = None  # a model folder, GGUF file or name; "feature" or "small" (the pack's); an EAGLE folder
    vocabulary: str = "auto"  # tokens that it scores: full, small (the pack's list and the prompt's tokens), or auto
    weights: str | None = None  # of the draft or the adapter: auto, int8 or int4
    gather: int = 4
    # What ends a block before `gather` tokens: nothing (count), a correction, an unsure token (unsure), or another
    # round not being worth its time (worth).
    until: str = "count"
    stores: tuple[str, ...] = ()
    budget: int = 7
    merge: bool = False
    adapt: bool = False
    candidates: int = 1
    agrees: float | None = None  # synthetic: the share of its tokens that agree with the tier above
    agrees_corrected: float | None = None  # the same of tokens that it corrects (default: as agrees)

    def __post_init__(self) -> None:
        exits = (self.exit_layer is not None) + (self.exit_depth is not None)
        if exits + (self.draft is not None) + bool(self.skip_layers) != 1:
            raise HierspecError(
                "A tier needs either exit_layer (layers of the target), exit_depth (their share), skip_layers (those "
                "to leave out) or draft (a model)."
            )
        if self.exit_layer is not None and self.exit_layer < 1:
            raise HierspecError(f"exit_layer must be at least 1, not {shown(self.exit_layer)}.")
        if self.exit_depth is not None and not 0 < self.exit_depth <= 1:
            raise HierspecError(f"exit_depth must be above 0 and at most 1, not {self.exit_depth}.")
        if self.early_exit and self.exit_depth is None:
            raise HierspecError("early_exit needs exit_depth beside it, for checkpoints that name no early exit.")
        if any(layer < 0 for layer in self.skip_layers) or len(set(self.skip_layers)) < len(self.skip_layers):
            raise HierspecError("skip_layers must be different whole numbers from 0 up.")
        if self.until not in UNTIL:
            raise HierspecError(f"until must be one of {_listed(UNTIL)}, not {shown(self.until)}.")
        for name in ("agrees", "agrees_corrected"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise HierspecError(f"{name} must be from 0 to 1, not {share}.")
        if self.agrees is None and self.agrees_corrected is not None:
            raise HierspecError("agrees_corrected needs agrees beside it.")
        for name, value, known in (("head", self.head, HEADS), ("vocabulary", self.vocabulary, VOCABULARIES)):
            if value not in known:
                raise HierspecError(f"Unknown {name} {shown(value)}{_nearest(value, known)}; choose {_listed(known)}.")
        if self.head != "auto" and not exits:
            raise HierspecError("head belongs to an exit: other tiers have their own.")
        if self.weights is not None and self.head == "shared":
            raise HierspecError("weights belongs to a draft or an adapter: this exit runs on the target's own weights.")
        _check_positive(self, "gather", "budget", "candidates")
        if max(self.exit_layer or 0, *self.skip_layers, 0) > _LARGEST_COUNT:
            raise HierspecError(f"Layers are counted from 0 up to {_LARGEST_COUNT:,} at most.")

    def __repr__(self) -> str:
        return _changed_fields(self)


@dataclass(frozen=True, repr=False)
class Plan:
    """The target's settings, then the tiers below it, nearest first. An empty plan is plain decoding."""

    model: str | None = None
    rule: str = "coupled"
    stores: tuple[str, ...] = ()
    budget: int = 7  # draft nodes per pass of the target: with the last written token it has 8 rows
    merge: bool = False  # also ask further stores and lower tiers, instead of stopping at the first proposal
    adapt: bool = False  # verify only drafts that are worth their time by measured costs
    tiers: tuple[TierPlan, ...] = ()

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise HierspecError(
                f"Unknown rule {shown(self.rule)}{_nearest(self.rule, RULES)}; rules are {_listed(RULES)}."
            )
        _check_positive(self, "budget")
        if self.synthetic and self.rule != "coupled":
            raise HierspecError(
                "agrees works under the rule coupled only: a synthetic tier has no distribution to hand up."
            )
        real = next((level for level, tier in enumerate(self.tiers) if tier.agrees is None), len(self.tiers))
        if any(tier.agrees is not None for tier in self.tiers[real:]):
            raise HierspecError(
                f"A tier below tier {real + 1} has agrees and tier {real + 1} has not; give it to every tier above too."
            )

    @property
    def weighs(self) -> bool:
        """Whether some tier ends its blocks by `until = "worth"`, for which the cost of passes must be measured."""
        return any(tier.until == "worth" for tier in self.tiers)

    @property
    def synthetic(self) -> bool:
        """Whether some tier only simulates how often it agrees: the measured speed is then no real model's."""
        return any(tier.agrees is not None for tier in self.tiers)

    def fixed(self) -> Plan:
        """The same tiers without decisions by cost, so that no costs need be measured. It only differs in speed."""
        tiers = tuple(
            replace(tier, adapt=False, until="count" if tier.until == "worth" else tier.until) for tier in self.tiers
        )
        return replace(self, adapt=False, tiers=tiers)

    def fitted(self, layers: int, early_exit: int | None = None) -> Plan:
        """The plan for a target of this many layers: each exit_depth becomes an exit_layer.

        A depth is rounded to a layer: at least the first, and at least one deeper than the next exit below. Tiers with
        `early_exit` exit at the layer that the checkpoint names, if it names one.
        """
        if all(tier.exit_depth is None for tier in self.tiers):
            return self
        tiers: list[TierPlan] = []
        below = 0  # the layer of the next exit below
        for tier in reversed(self.tiers):
            if tier.exit_depth is not None:
                layer = min(layers, max(round(layers * tier.exit_depth), below + 1))
                if tier.early_exit and early_exit is not None:
                    layer = early_exit
                tier = replace(tier, exit_layer=layer, exit_depth=None, early_exit=False)
            below = tier.exit_layer or below
            tiers.append(tier)
        return replace(self, tiers=tuple(reversed(tiers)))

    @staticmethod
    def named(name: str, layers: int, early_exit: int | None = None) -> Plan:
        """One of the plans that ship, fitted to a target of this many layers with this early exit."""
        if name not in NAMED:
            names = ("auto", *NAMED)  # auto depends on the model and the machine
            raise HierspecError(
                f"There is no plan or plan file {shown(name)}{_nearest(name, names)}; plans are {_listed(names)}, or "
                "give a TOML file."
            )
        return _shipped(name).fitted(layers, early_exit)

    @staticmethod
    def read(path: str | Path) -> Plan:
        text = read_text(
            path,
            lambda reason: HierspecError(
                f"The plan file {shown_path(path)} cannot be read ({reason}); name a TOML file."
            ),
            _LARGEST_FILE,
        )
        try:
            return Plan.from_toml(text)
        except HierspecError as error:
            raise HierspecError(f"{shown_path(path)}: {error}") from error

    @staticmethod
    def from_toml(text: str) -> Plan:
        table = toml_table(text, lambda reason: HierspecError(f"The plan is not valid TOML: {reason}."))
        tiers = table.pop("tier", [])
        if not isinstance(tiers, list) or not all(isinstance(tier, dict) for tier in tiers):
            raise HierspecError("Tiers are written as [[tier]], with double brackets.")
        if len(tiers) > _MOST_TIERS:
            raise HierspecError(f"A plan has at most {_MOST_TIERS} tiers, not {len(tiers)}.")
        return Plan(
            **_checked(Plan, table, "plan", leave_out="tiers", also="tier"),
            tiers=tuple(_tier(number, tier) for number, tier in enumerate(tiers, 1)),
        )

    def __repr__(self) -> str:
        return _changed_fields(self)

    def to_toml(self) -> str:
        parts = [_table(self, leave_out="tiers")]
        parts += ["[[tier]]\n" + _table(tier) for tier in self.tiers]
        return "\n".join(part for part in parts if part)


def _changed_fields(plan: Plan | TierPlan) -> str:
    """As it could be written in Python: only what differs from the defaults."""
    values = [(option.name, getattr(plan, option.name)) for option in fields(plan) if option.repr]
    usual = {option.name: option.default for option in fields(plan)}
    changed = (f"{name}={value!r}" for name, value in values if value != usual[name])
    return f"{type(plan).__name__}({', '.join(changed)})"


@cache  # a request may name its plan
def _shipped(name: str) -> Plan:
    return Plan.read(_SHIPPED / f"{name}.toml")


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
            raise HierspecError(
                f"Unknown key {shown(key)} in the {where}{_nearest(key, names)}; keys are {_listed(names)}."
            )
        wanted = kinds[key].removesuffix(" | None")
        if wanted.startswith("tuple"):
            item_kind = "int" if "int" in wanted else "str"
            good = isinstance(value, list) and all(type(item).__name__ == item_kind for item in value)
            value = tuple(value) if good else value
        elif wanted == "float" and type(value) is int:
            good = abs(value) < 1 << 63
            value = float(value) if good else value
        else:
            good = type(value).__name__ == wanted
        if not good:
            raise HierspecError(f"{key} in the {where} must be {_IN_WORDS[wanted]}, not {shown(value)}.")
        values[key] = value
    return values


def _table(item: Plan | TierPlan, leave_out: str = "") -> str:
    """Only what differs from the defaults, so that a plan file says what matters."""
    lines = []
    for f in fields(item):
        value = getattr(item, f.name)
        if f.name != leave_out and (value != f.default or f.name in ("rule", "gather")):
            written = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
            # JSON strings are valid TOML, except for surrogate pairs (not made here) and a bare DEL.
            lines.append(f"{f.name} = {written}\n".replace("\x7f", "\\u007f"))
    return "".join(lines)


def _check_positive(item: object, *names: str) -> None:
    for name in names:
        value = getattr(item, name)
        if value < 1:
            raise HierspecError(f"{name} must be at least 1, not {shown(value)}.")
        if value > _LARGEST_COUNT:
            raise HierspecError(f"{name} must be at most {_LARGEST_COUNT:,}, not {shown(value)}.")


def _nearest(word: str, known: Iterable[str]) -> str:
    if not isinstance(word, str) or len(word) > 100:  # no typing error, and the search would be slow
        return ""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
