"""The other programs: what each one was given, how its setting was found, and which could not run and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hierspec_bench.page.figures import counted, exact, section, table
from hierspec_bench.page.markup import Child, Html, element
from hierspec_bench.page.reading import PEER, Entry, Run, mapping, mappings, real


def peers_section(run: Run) -> Html | None:
    absent = mapping(run.document.get("absent_peers"))
    told = [entry for entry in run.main.named(PEER) if mapping(entry.figures.get("about"))]
    if not absent and not told:
        return None
    parts: list[Child] = []
    if told:
        parts.append(element("div", *(_card(entry) for entry in told), class_="cards"))
    if absent:
        reasons = [[element("dt", str(name)), element("dd", str(reason))] for name, reason in absent.items()]
        parts += [element("h3", "Could not run here"), element("dl", *reasons, class_="reasons")]
    return section("peers", "Peers", *parts)


def _card(entry: Entry) -> Html:
    about = mapping(entry.figures["about"])
    rows: list[Child] = []
    for name, value in about.items():
        if name not in ("searched", "note") and value not in (None, "", {}):
            rows.append([element("dt", str(name)), element("dd", described(value))])
    note = element("p", str(about["note"]), class_="muted") if about.get("note") else None
    return element("div", element("h3", entry.name), element("dl", *rows, class_="facts"), note, _searched(about),
                   class_="card")  # fmt: skip


def _searched(about: Mapping[str, Any]) -> Html | None:
    tried = mappings(about.get("searched"))
    if not tried:
        return None
    best = max((real(one.get("tokens_per_second")) or 0.0 for one in tried), default=0.0)
    rows: list[list[Child]] = []
    for one in tried:
        speed = real(one.get("tokens_per_second"))
        said: Child = element("span", "best", class_="good") if speed is not None and speed == best else None
        if one.get("error"):
            said = element("span", str(one["error"]), class_="muted")
        rows.append([described(one.get("setting")), exact(one.get("tokens_per_second")), said])
    inner = table("", ["setting", "tokens/s", ""], rows, texts=(0, 2))
    return element("details", element("summary", f"{counted(len(tried), 'setting')} tried"), inner)


def described(value: object) -> str:
    """Anything of a record, in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {described(inner)}" for name, inner in value.items()) or "as it comes"
    if isinstance(value, list | tuple):
        return ", ".join(described(inner) for inner in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return exact(value)
