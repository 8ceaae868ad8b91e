"""Other engines: their settings, how those were found, and which engines could not run and why."""

from __future__ import annotations

from collections.abc import Mapping

from hierspec_bench.page.figures import counted, exact, section, table
from hierspec_bench.page.markup import Child, Html, element
from hierspec_bench.record import PEER, Entry, Record


def peers_section(record: Record) -> Html | None:
    described_engines = [entry for entry in record.main.named(PEER) if entry.about]
    if not record.absent and not described_engines:
        return None
    parts: list[Child] = []
    if described_engines:
        parts.append(element("div", *(_card(entry) for entry in described_engines), class_="cards"))
    if record.absent:
        reasons = [[element("dt", name), element("dd", reason)] for name, reason in record.absent.items()]
        parts += [element("h3", "Could not run here"), element("dl", *reasons, class_="reasons")]
    return section("peers", "Baselines: other engines", *parts)


def _card(entry: Entry) -> Html:
    rows: list[Child] = []
    for name, value in entry.about.items():
        if name not in ("searched", "note") and value not in (None, "", {}):
            rows.append([element("dt", str(name)), element("dd", described(value))])
    note = element("p", str(entry.about["note"]), class_="muted") if entry.about.get("note") else None
    facts = element("dl", *rows, class_="facts")
    return element("div", element("h3", entry.name), facts, note, _tried(entry), class_="card")


def _tried(entry: Entry) -> Html | None:
    tried = entry.tried_settings
    if not tried:
        return None
    best = max(setting.tokens_per_second or 0.0 for setting in tried)
    rows: list[list[Child]] = []
    for setting in tried:
        remark: Child = element("span", "best", class_="good") if setting.tokens_per_second == best else None
        if setting.error:
            remark = element("span", setting.error, class_="muted")
        rows.append([described(setting.setting), exact(setting.tokens_per_second), remark])
    inner = table("", ["setting", "tokens/s", ""], rows, texts=(0, 2))
    return element("details", element("summary", f"{counted(len(tried), 'setting')} tried"), inner)


def described(value: object) -> str:
    """Any value of a record, in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {described(inner)}" for name, inner in value.items()) or "its defaults"
    if isinstance(value, list | tuple):
        return ", ".join(described(inner) for inner in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return exact(value)
