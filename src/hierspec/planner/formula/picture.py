"""A hierarchy as a picture: tiers from the target down, the blocks handed up between them, and where the time goes."""

from __future__ import annotations

from xml.sax.saxutils import escape

from hierspec.planner.formula.figures import Figures, TierConfig
from hierspec.planner.formula.latency import Score, TierScore
from hierspec.plot import COLOURS

_WIDTH, _LEFT, _BOX, _HEIGHT, _GAP, _TOP = 760, 40, 300, 66, 62, 84
_BAR = 250  # of the whole time
_STYLE = """
    .title { font-size: 17px; font-weight: bold; fill: #1f2937; }
    .name { font-size: 15px; fill: #ffffff; font-weight: bold; }
    .inside { font-size: 13px; fill: #ffffff; }
    .text { font-size: 13px; fill: #4b5563; }
    .arrow { stroke: #64748b; stroke-width: 2; fill: none; }
    .card { fill: #ffffff; stroke: #d0d7de; }
    .bar { fill: #e2e8f0; }
    @media (prefers-color-scheme: dark) {
      .title { fill: #e5e7eb; }
      .text { fill: #9ca3af; }
      .card { fill: #111827; stroke: #374151; }
      .bar { fill: #374151; }
    }
"""


def picture(figures: Figures, best: Score, title: str = "") -> str:
    """SVG text that follows the page: dark on light, light on dark."""
    plain, right = figures.target.seconds(1), _LEFT + _BOX + 40
    height = _TOP + len(best.hierarchy) * (_HEIGHT + _GAP) - _GAP + 36
    summary = (
        f"predicted {1e3 * best.seconds:.3g} ms per token, {plain / best.seconds:.2f}x plain decoding; "
        f"{best.tokens_per_pass:.2f} tokens per pass of {figures.target.name}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title" font-family="sans-serif">',
        f'<title id="title">{escape(title or "The hierarchy")}</title>',
        f"<style>{_STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="12" class="card"/>',
        _text(24, 32, title or "The hierarchy", "title"),
        _text(24, 54, summary, "text"),
        _text(right, _TOP - 8, "share of the time", "text"),
    ]
    for level, (config, tier) in enumerate(zip(best.hierarchy, best.tiers, strict=True)):
        top = _TOP + level * (_HEIGHT + _GAP)
        colour = COLOURS[(5 if level == 0 else level - 1) % len(COLOURS)]
        pass_ms = 1e3 * tier.seconds / tier.passes if tier.passes else 0.0
        parts += [
            f'<rect x="{_LEFT}" y="{top}" width="{_BOX}" height="{_HEIGHT}" rx="8" fill="{colour}"/>',
            _text(_LEFT + 14, top + 26, config.tier, "name"),
            _text(_LEFT + 14, top + 48, f"{pass_ms:.3g} ms per pass of {tier.rows:.1f} rows", "inside"),
            f'<rect x="{right}" y="{top + 8}" width="{_BAR}" height="16" class="bar"/>',
            f'<rect x="{right}" y="{top + 8}" width="{_BAR * tier.share:.1f}" height="16" fill="{colour}"/>',
            _text(right + _BAR + 10, top + 21, f"{100 * tier.share:.0f}%", "text"),
        ]
        if config.store is not None:
            hit_rate = figures.store(config.tier, config.store).hit_rate
            asks = f"asks {config.store} first: a proposal in {100 * hit_rate:.0f}% of passes"
            parts.append(_text(right, top + 48, asks, "text"))
        if level:
            middle = _LEFT + 60
            parts += [
                f'<path class="arrow" d="M{middle} {top - 4}V{top - _GAP + 8}"/>',
                f'<path class="arrow" d="M{middle - 6} {top - _GAP + 15}L{middle} {top - _GAP + 6}L{middle + 6} '
                f'{top - _GAP + 15}"/>',
                _text(middle + 16, top - _GAP / 2 + 4, _handed_up(config, tier), "text"),
            ]
    return "\n".join([*parts, "</svg>", ""])


def _handed_up(config: TierConfig, tier: TierScore) -> str:
    block = f"{config.gather} token{'s' if config.gather > 1 else ''} or more"
    block += ", or up to a correction" if config.until == "correction" else ""
    return f"{block}: {tier.block_tokens:.1f} on average, {tier.block_tokens * tier.accepted:.1f} accepted"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
