"""Formatting of figures, and building blocks of all sections of the page."""

from __future__ import annotations

from collections.abc import Sequence

from hierspec_bench.page.markup import Child, Html, element, joined
from hierspec_bench.record import PEER, PLAIN, Entry
from hierspec_bench.typed_json import number

NOTHING = "–"


def times(value: float | None) -> str:
    """1.17×, or 12.3× from 10 on, where a third decimal means nothing."""
    if value is None:
        return NOTHING
    return f"{value:.2f}×" if abs(value) < 10 else f"{value:.1f}×"


def rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.1f}"


def exact(value: object) -> str:
    """The value as the record has it."""
    figure = number(value)
    if figure is None:
        return NOTHING if value is None else str(value)
    if figure.is_integer() and isinstance(value, int):
        return f"{value:,}"
    return f"{figure:,.10g}"


def percent(share: float) -> str:
    """A percentage, in which 100% means all and 0% means nothing."""
    shown = f"{100 * share:.0f}%"
    if shown == "100%" and share < 1:
        return "> 99%"
    return "< 1%" if shown == "0%" and share > 0 else shown


def counted(size: int, noun: str) -> str:
    return f"{size:,} {noun}{'' if size == 1 else 's'}"


def look(entry: Entry, best: Entry | None) -> str:
    """The class of an entry's bar: plain grey, ours in one colour, the fastest stronger, other engines hatched."""
    if entry.kind == PEER:
        return PEER
    if entry.kind == PLAIN or (not entry.alone and entry.name.startswith(PLAIN)):
        return PLAIN
    return "best" if best is not None and entry.name == best.name else "plan"


def tag(entry: Entry) -> str:
    return "baseline" if entry.kind == PEER else ""


def tagged(entry: Entry) -> Child:
    return [entry.name, element("span", tag(entry), class_="tag") if tag(entry) else None]


def section(key: str, title: str, *children: Child) -> Html:
    heading = element("h2", title, id=f"{key}-title")
    return element("section", heading, *children, id=key, aria_labelledby=f"{key}-title")


def figure(caption: str, *children: Child, title: str = "", wide: bool = False) -> Html:
    heading = element("h3", title) if title else None
    return element(
        "figure",
        heading,
        *children,
        element("figcaption", caption) if caption else None,
        class_="wide" if wide else None,
    )


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[Child]], texts: Sequence[int] = (0,)) -> Html:
    """A table that scrolls in its own box. Columns of `texts` are words, all others figures."""

    def cell(column: int, child: Child) -> Html:
        if column == 0:
            return element("th", child, scope="row")
        return element("td", child, class_=None if column in texts else "figure")

    head = [
        element("th", name, scope="col", class_=None if column in texts else "figure")
        for column, name in enumerate(heads)
    ]
    body = [element("tr", *(cell(column, child) for column, child in enumerate(row))) for row in rows]
    inner = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    label = caption or ", ".join(heads)
    box = element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=label)
    # Outside the box: a caption inside would scroll away with the columns.
    return joined(element("p", caption, class_="caption") if caption else None, box)
