"""Charts as SVG text: nothing to install, nothing to load, and readable on light and dark pages.

chart = Chart("Cost against size", Axis("tokens", logarithmic=True), Axis("microseconds"), [Line("store", points)])
path.write_text(chart.svg(), encoding="utf-8")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# For light ground: all with a contrast of 3 or more. Each of the last six is near the one six before it, for pairs.
COLOURS = (
    *("#0f8577", "#3a6fc4", "#c2410c", "#7c3aed", "#a16207", "#475569"),
    *("#3f9b3a", "#0d94c0", "#e8506e", "#c44ac4", "#7d8c12", "#94847a"),
)
# The same in the same order for dark ground.
DARK_COLOURS = (
    *("#4fd1bd", "#8db4ff", "#ff9f6e", "#c9adff", "#e8c05a", "#aebccf"),
    *("#5fae4c", "#3aa0d0", "#e8667f", "#cc6fd0", "#9cab3a", "#9d8d82"),
)
PAIRED = len(COLOURS) // 2  # from a colour to the one that is near it
_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 190, 64, 62  # margins of the plot: numbers, legend, title, label
_SHAPES = """
    .title { font-size: 17px; font-weight: bold; }
    .text { font-size: 13px; }
    .grid { stroke-width: 1; }
    .frame { stroke-width: 1.2; fill: none; }
    .line { stroke-width: 2.2; fill: none; stroke-linejoin: round; }
    .dot { stroke-width: 1.6; }
    .dashed { stroke-dasharray: 6 4; }
"""
_LIGHT = {
    **{"card": "#ffffff", "edge": "#d0d7de", "title": "#1f2937", "text": "#4b5563", "grid": "#e2e8f0"},
    "lightness": "33%",  # of colours beyond the palette
}
_DARK = {
    **{"card": "#19202a", "edge": "#2e3947", "title": "#e7ecf3", "text": "#a4b1c2", "grid": "#2e3947"},
    "lightness": "70%",
}
_FRAME = "#94a3b8"  # on either ground


@dataclass(frozen=True)
class Line:
    """Points (x, y) in the order in which they are joined, or dots alone where points have no order."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    colour: int | None = None  # index into COLOURS, no two lines of a chart the same; None: its place in the chart
    joined: bool = True


@dataclass(frozen=True)
class Axis:
    label: str
    logarithmic: bool = False
    least: float | None = None  # where it begins; None: where the points do (not logarithmic: at 0 or below)

    def scale(self, values: Sequence[float]) -> Scale:
        """The range that shows these values, with ticks at round numbers."""
        low, high = min(values), max(values)
        if self.logarithmic:
            low = low if self.least is None else self.least
            if low <= 0:
                raise ValueError(f"the axis {self.label!r} is logarithmic and cannot show {low}")
            return _logarithmic(low, max(low, high))
        low = min(0.0, low) if self.least is None else self.least
        return _linear(low, high)


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        if self.logarithmic:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    note: str = ""  # a line below the title

    def svg(self) -> str:
        points = [point for line in self.lines for point in line.points]
        if not points:
            raise ValueError("a chart needs a point")
        colours = self._colours()
        across, up = self.x.scale([x for x, _ in points]), self.y.scale([y for _, y in points])
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

        def at(x: float, y: float) -> tuple[float, float]:
            return _LEFT + across.share(x) * (right - _LEFT), bottom - up.share(y) * (bottom - _TOP)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" role="img" aria-labelledby="title" font-family="sans-serif">',
            f'<title id="title">{escape(self.title)}</title>',
            f"<style>{_style(colours)}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="12"/>',
            _text(24, 30, self.title, "title", "start"),
            _text(24, 50, self.note, "text", "start"),
        ]
        for tick in across.ticks:
            x, _ = at(tick, up.low)
            parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
            parts.append(_text(x, bottom + 20, short_number(tick), "text", "middle"))
        for tick in up.ticks:
            _, y = at(across.low, tick)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            parts.append(_text(_LEFT - 8, y + 4, short_number(tick), "text", "end"))
        parts.append(f'<path class="frame" stroke="{_FRAME}" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        parts.append(_text((_LEFT + right) / 2, bottom + 44, self.x.label, "text", "middle"))
        parts.append(
            f'<g transform="translate(24 {(_TOP + bottom) / 2:.0f}) rotate(-90)">'
            f"{_text(0, 0, self.y.label, 'text', 'middle')}</g>"
        )
        for number, (line, colour) in enumerate(zip(self.lines, colours, strict=True)):
            look = f'class="line c{colour}{" dashed" if line.dashed else ""}"'
            dot = f'class="dot c{colour}{" hollow" if line.dashed else ""}"'
            places = [at(x, y) for x, y in line.points]
            height = _TOP + 14 + 22 * number  # in the legend
            if line.joined:
                parts.append(f'<path {look} d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>')
                parts.append(f'<path {look} d="M{right + 14} {height}h26"/>')
            else:
                parts.append(f'<path {dot} d="M{right + 23} {height}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0"/>')
            parts += [f'<circle {dot} cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
            parts.append(_text(right + 46, height + 4, line.name, "text", "start"))
        return "\n".join([*parts, "</svg>", ""])

    def _colours(self) -> list[int]:
        colours = [number if line.colour is None else line.colour for number, line in enumerate(self.lines)]
        if len(set(colours)) < len(colours):
            raise ValueError("two lines of a chart cannot have one colour")
        return colours


def _style(colours: Sequence[int]) -> str:
    """Light, and dark where the reader's system is."""
    light, dark = _rules(colours, COLOURS, _LIGHT), _rules(colours, DARK_COLOURS, _DARK)
    return f"{_SHAPES}{light}    @media (prefers-color-scheme: dark) {{\n{dark}    }}\n"


def _rules(colours: Sequence[int], palette: Sequence[str], ground: dict[str, str]) -> str:
    rules = [f".card {{ fill: {ground['card']}; stroke: {ground['edge']}; }}", f".grid {{ stroke: {ground['grid']}; }}"]
    rules += [f".{name} {{ fill: {ground[name]}; }}" for name in ("title", "text")]
    for colour in colours:
        paint = palette[colour] if colour < len(palette) else f"hsl({137 * colour % 360} 60% {ground['lightness']})"
        rules += [f".c{colour} {{ stroke: {paint}; }}", f".dot.c{colour} {{ fill: {paint}; }}"]
    rules.append(f".dot.hollow {{ fill: {ground['card']}; }}")
    return "".join(f"    {rule}\n" for rule in rules)


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _logarithmic(low: float, high: float) -> Scale:
    """From a 1, 2 or 5 times a power of ten to another, with ticks at those, or at the powers where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    below = max(step for step in steps if step <= low * (1 + 1e-9))
    above = min(step for step in steps if step >= high * (1 - 1e-9) and step > below)
    ticks = [step for step in steps if below <= step <= above]
    if len(ticks) > 7:
        ticks = [10.0**power for power in range(first, last + 1) if below <= 10.0**power <= above]
    return Scale(below, above, tuple(ticks), True)


def _linear(low: float, high: float) -> Scale:
    """Four to nine ticks at multiples of 1, 2 or 5 times a power of ten."""
    if high - low <= max(1e-200, 1e-12 * abs(low)):  # too little to show
        high = low + 1
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(digit * power for digit in (1, 2, 5, 10) if (high - low) / (digit * power) <= 8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Scale(first * step, last * step, tuple(number * step for number in range(first, last + 1)), False)


def short_number(value: float) -> str:
    """1,000 as 1k: ticks must be short."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
