"""Charts that fit any width: SVG with positions in percent and text in pixels, so that phones show readable text.

Ranges and ticks are those of `hierspec.plot`; these charts are part of a page and use its colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hierspec.plot import Axis, Scale, short_number
from hierspec_bench.page.markup import Html, element

_ROW, _BAR = 24, 12
_ABOVE, _COLUMNS = 16, 92
_CURVES = 260


@dataclass(frozen=True)
class Part:
    """A segment of a bar. `look` is a class of the style sheet."""

    value: float
    look: str
    name: str = ""


@dataclass(frozen=True)
class Bar:
    name: str
    parts: tuple[Part, ...]
    shown: str  # the value as text beside the bar
    tag: str = ""  # what kind of entry it is, if the name does not say
    low: float | None = None
    high: float | None = None
    beside: str = ""  # smaller, after the figure

    @property
    def end(self) -> float:
        return max(sum(part.value for part in self.parts), self.high or 0.0)


def bar_scale(bars: Sequence[Bar], *others: float) -> Scale:
    """One range for charts that are to be compared."""
    return Axis("").scale([*(bar.end for bar in bars), *others, 0.0])


def bar_chart(bars: Sequence[Bar], scale: Scale, unit: str, mark: float | None = None) -> Html:
    """Horizontal bars, one per row, with whiskers for intervals and a line at `mark`."""
    rows = [_row(bar, scale, unit, mark) for bar in bars]
    return element("ul", *rows, _ticks(scale, unit), class_="bars")


def _row(bar: Bar, scale: Scale, unit: str, mark: float | None) -> Html:
    lines = [
        element("line", class_="grid", x1=_at(scale, t), x2=_at(scale, t), y1=-3, y2=_ROW + 3) for t in scale.ticks
    ]
    drawn, start = [], 0.0
    for part in bar.parts:
        title = element("title", f"{part.name}: {part.value:.3g} {unit}") if part.name else None
        width = f"{100 * max(0.0, scale.share(start + part.value) - scale.share(start)):.2f}%"
        top = (_ROW - _BAR) / 2
        drawn.append(element("rect", title, class_=part.look, x=_at(scale, start), y=top, width=width, height=_BAR))
        start += part.value
    if mark is not None:
        drawn.append(element("line", class_="mark", x1=_at(scale, mark), x2=_at(scale, mark), y1=0, y2=_ROW))
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        low, high, middle = _at(scale, max(scale.low, bar.low)), _at(scale, bar.high), _ROW / 2
        for look in ("halo", "whisker"):  # a rim in the colour of the page, so that whiskers show on the bar too
            drawn.append(element("line", class_=look, x1=low, x2=high, y1=middle, y2=middle))
            drawn += [element("line", class_=look, x1=x, x2=x, y1=middle - 4, y2=middle + 4) for x in (low, high)]
    parts = ", ".join(f"{part.name} {part.value:.3g} {unit}" for part in bar.parts if part.name)
    interval = f", 95% interval {bar.low:.3g} to {bar.high:.3g}" if bar.low is not None and bar.high is not None else ""
    described = f"{bar.name}: {bar.shown}{interval}{' (' + parts + ')' if parts else ''}"
    return element(
        "li",
        element("span", bar.name, element("span", bar.tag, class_="tag") if bar.tag else None, class_="name"),
        element("svg", element("title", described), *lines, *drawn, role="img", width="100%", height=_ROW),
        element("span", bar.shown, element("small", bar.beside) if bar.beside else None, class_="value"),
    )


def _ticks(scale: Scale, unit: str) -> Html:
    texts = []
    for index, tick in enumerate(scale.ticks):
        anchor = "middle" if index else "start"
        texts.append(element("text", short_number(tick), x=_at(scale, tick), y=13, text_anchor=anchor))
    axis = element("svg", *texts, width="100%", height=18)
    name, value = element("span", class_="name"), element("span", unit, class_="value")
    return element("li", name, axis, value, class_="axis", aria_hidden="true")


def legend(names: Sequence[tuple[str, str]]) -> Html:
    """A legend of (name, look) pairs."""
    keys = []
    for name, look in names:
        box = element("rect", class_=look, width=14, height=14, rx=3)
        keys.append(element("li", element("svg", box, class_="key", width=14, height=14, aria_hidden="true"), name))
    return element("ul", *keys, class_="legend")


def column_chart(title: str, whole: Sequence[float], filled: Sequence[float], highest: float, look: str) -> Html:
    """Columns by depth, from 1: the whole outlined, and the part that counted filled.

    Columns higher than `highest` are cut there, with their size above.
    """
    step, floor, drawn = 100 / max(1, len(whole)), _ABOVE + _COLUMNS, []
    every = max(1, -(-len(whole) // 8))  # labels must not overlap
    for depth, value in enumerate(whole):
        counted = filled[depth] if depth < len(filled) else 0.0
        left, width = f"{(depth + 0.12) * step:.2f}%", f"{0.76 * step:.2f}%"
        columns = []
        for kind, amount in (("offered", value), (look, counted)):
            high = _COLUMNS * min(1.0, amount / highest)
            top = f"{_ABOVE + _COLUMNS - high:.1f}"
            columns.append(element("rect", class_=kind, x=left, width=width, y=top, height=f"{high:.1f}"))
        hint = element("title", f"Depth {depth + 1}: {counted:.2f} of {value:.2f} a pass")
        drawn.append(element("g", hint, *columns))
        if depth % every == 0:
            middle = f"{(depth + 0.5) * step:.2f}%"
            drawn.append(element("text", str(depth + 1), x=middle, y=floor + 15, text_anchor="middle"))
            if value > highest:
                size = short_number(round(value, 1))
                drawn.append(element("text", size, x=middle, y=_ABOVE - 4, text_anchor="middle"))
    line = element("line", class_="floor", x1="0", x2="100%", y1=floor, y2=floor)
    name = element("title", title)
    return element("svg", name, *drawn, line, role="img", class_="columns", width="100%", height=floor + 20)


@dataclass(frozen=True)
class Curve:
    name: str
    points: tuple[tuple[float, float], ...]
    look: str


def curve_chart(title: str, curves: Sequence[Curve], x: Scale, y: Scale) -> Html:
    """Lines over a shared x axis. Lines stretch to the width; dots and text keep their shape."""
    described = "; ".join(f"{curve.name}: " + ", ".join(f"{b:g} at {a:g}" for a, b in curve.points) for curve in curves)
    high = _CURVES - 26

    def down(value: float) -> float:
        return 8 + (high - 8) * (1 - y.share(value))

    drawn, beside = [], []
    for tick in y.ticks:
        height = f"{down(tick):.1f}"
        drawn.append(element("line", class_="grid", x1="0", x2="100%", y1=height, y2=height))
        beside.append(element("text", short_number(tick), x=0, y=f"{down(tick) + 4:.1f}"))
    for index, tick in enumerate(x.ticks):
        anchor = "start" if index == 0 else "end" if index == len(x.ticks) - 1 else "middle"
        drawn.append(element("text", short_number(tick), x=_at(x, tick), y=high + 18, text_anchor=anchor))
    whole = {"width": "100%", "height": str(_CURVES), "viewBox": f"0 0 100 {_CURVES}", "preserveAspectRatio": "none"}
    for curve in curves:
        path = "L".join(f"{100 * x.share(a):.2f} {down(b):.2f}" for a, b in curve.points)
        line = element("path", d=f"M{path}", class_=f"curve {curve.look}")
        drawn.append(element("svg", line, x="0", y="0", **whole))
        for a, b in curve.points:
            hint = element("title", f"{curve.name} at {a:g}: {b:g}")
            drawn.append(element("circle", hint, class_=f"dot {curve.look}", cx=_at(x, a), cy=f"{down(b):.1f}", r=4))
    words = (element("title", title), element("desc", described))
    return element(
        "div",
        element("svg", *beside, width="100%", height=_CURVES, aria_hidden="true"),
        element("svg", *words, *drawn, role="img", width="100%", height=_CURVES),
        class_="curves",
    )


def _at(scale: Scale, value: float) -> str:
    return f"{100 * min(1.0, max(0.0, scale.share(value))):.2f}%"
