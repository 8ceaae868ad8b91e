"""A hierarchy as a picture: tiers from the target down, what goes up between them, and where the time goes."""

from __future__ import annotations

from xml.sax.saxutils import escape

from hierspec.planner.formula.figures import Figures
from hierspec.planner.formula.latency import Score
from hierspec.plot import COLOURS

_WIDTH, _LEFT, _BOX, _HEIGHT, _GAP, _TOP = 760, 40, 300, 66, 62, 84
_BAR = 250  # of the whole time
_STYLE = """
    .title { font-size: 17px; font-weight: bold; fill: #1f2937; }
    .name { font-size: 15px; fill: #ffffff; font-weight: bold; }
    .inside { font-size: 13px; fill: #ffffff; }
    .text { font-size: 13px; fill: #4b5563; }
    .arrow { stroke: #64748b; stroke-width: 2; fill: none; }
"""


def picture(figures: Figures, best: Score, title: str = "") -> str:
    """SVG text, the same on light and dark pages."""
    plain, right = figures.target.seconds(1), _LEFT + _BOX + 40
    height = _TOP + len(best.ladder) * (_HEIGHT + _GAP) - _GAP + 36
    said = (
        f"predicted {1e3 * best.seconds:.3g} ms a token, {plain / best.seconds:.2f}x plain decoding; "
        f"{best.tokens_per_pass:.2f} tokens a pass of {figures.target.name}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title" font-family="sans-serif">',
        f'<title id="title">{escape(title or "The hierarchy")}</title>',
        f"<style>{_STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="12" fill="#ffffff" stroke="#d0d7de"/>',
        _text(24, 32, title or "The hierarchy", "title"),
        _text(24, 54, said, "text"),
        _text(right, _TOP - 8, "share of the time", "text"),
    ]
    for level, (rung, found) in enumerate(zip(best.ladder, best.rungs, strict=True)):
        top = _TOP + level * (_HEIGHT + _GAP)
        colour = COLOURS[(5 if level == 0 else level - 1) % len(COLOURS)]
        each = 1e3 * found.seconds / found.passes if found.passes else 0.0
        parts += [
            f'<rect x="{_LEFT}" y="{top}" width="{_BOX}" height="{_HEIGHT}" rx="8" fill="{colour}"/>',
            _text(_LEFT + 14, top + 26, rung.tier, "name"),
            _text(_LEFT + 14, top + 48, f"{each:.3g} ms a pass of {found.rows:.1f} rows", "inside"),
            f'<rect x="{right}" y="{top + 8}" width="{_BAR}" height="16" fill="#e2e8f0"/>',
            f'<rect x="{right}" y="{top + 8}" width="{_BAR * found.share:.1f}" height="16" fill="{colour}"/>',
            _text(right + _BAR + 10, top + 21, f"{100 * found.share:.0f}%", "text"),
        ]
        if rung.store is not None:
            store = figures.store(rung.tier, rung.store)
            parts.append(
                _text(
                    right, top + 48,
                    f"asks {rung.store} first: a guess in {100 * store.share:.0f}% of passes", "text",
                )
            )  # fmt: skip
        if level:
            middle = _LEFT + 60
            parts += [
                f'<path class="arrow" d="M{middle} {top - 4}V{top - _GAP + 8}"/>',
                f'<path class="arrow" d="M{middle - 6} {top - _GAP + 15}L{middle} {top - _GAP + 6}L{middle + 6} '
                f'{top - _GAP + 15}"/>',
                _text(
                    middle + 16,
                    top - _GAP / 2 + 4,
                    _handed(rung.gather, rung.until, found.gathered, found.stands),
                    "text",
                ),
            ]
    return "\n".join([*parts, "</svg>", ""])


def _handed(gather: int, until: str, gathered: float, stands: float) -> str:
    said = f"{gather} token{'s' if gather > 1 else ''} or more"
    said += ", or up to a correction" if until == "correction" else ""
    return f"{said}: {gathered:.1f} on average, of which {gathered * stands:.1f} stand"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
