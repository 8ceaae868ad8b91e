"""A text as HTML for notebooks, coloured by who drafted it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

# Half transparent behind text in the page's own colour: readable on light and on dark.
_COLOURS = ("46,160,67", "31,136,229", "191,90,242", "214,158,0", "229,83,75", "0,150,160")


def coloured(pieces: Sequence[tuple[str, str]], sources: Sequence[str]) -> str:
    """Pieces of text with their sources; `sources` has one entry per token (the legend). The target has no colour."""
    drafters = [source for source in dict.fromkeys(sources) if source != "target"]
    colours = {source: _COLOURS[number % len(_COLOURS)] for number, source in enumerate(drafters)}
    text = "".join(_marked(part, source, colours.get(source)) for part, source in pieces)
    counts, total = Counter(sources), max(1, len(sources))
    legend = ", ".join(
        _marked(f"{source} {100 * count / total:.0f}%", source, colours.get(source))
        for source, count in counts.most_common()
    )
    return (
        f'<div style="white-space:pre-wrap">{text}</div>'
        f'<div style="font-size:smaller;margin-top:.5em">drafted by: {legend}</div>'
    )


def _marked(text: str, source: str, colour: str | None) -> str:
    if colour is None:
        return f"<span>{escape(text)}</span>"
    style = f"background:rgba({colour},.3);border-radius:2px"
    return f'<span title="{escape(source)}" style="{style}">{escape(text)}</span>'
