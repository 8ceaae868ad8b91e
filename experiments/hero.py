"""Draw the README's chart: plain decoding beside a plan, on the prompt of `make demo`.

It draws docs/pictures/hero.svg from docs/results/demo.json, which is what `make demo` measures, as JSON:
hierspec generate --check --json --max-tokens 200 -f examples/demo_prompt.txt > docs/results/demo.json

example:
  python experiments/hero.py docs/results/demo.json docs/pictures/hero.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from hierspec.paths import whole_file

WIDTH, HEIGHT = 760, 210
LEFT, RIGHT, TOP, BAR, GAP = 96, 160, 84, 40, 16
STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de; }
    .title { font-size: 19px; font-weight: bold; fill: #1f2937; }
    .text { font-size: 14px; fill: #4b5563; }
    .number { font-size: 16px; font-weight: bold; fill: #1f2937; }
    .plain { fill: #94a3b8; }
    .plan { fill: #0f8577; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #19202a; stroke: #2e3947; }
      .title, .number { fill: #e7ecf3; }
      .text { fill: #a4b1c2; }
      .plain { fill: #64748b; }
      .plan { fill: #4fd1bd; }
    }
  """


def drawing(record: Mapping[str, Any]) -> str:
    """The chart as SVG. `record` is what `hierspec generate --check --json` prints."""
    plan, speedup = str(record["plan"]), float(record["speedup"])
    rates = {"plain": float(record["plain_tokens_per_second"]), plan: float(record["tokens_per_second"])}
    title = f"The same text, {speedup:.2f} times as fast"
    note = f"{record['model']}, {record['products']}, {len(record['tokens'])} tokens of make demo, prefill included"
    description = ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in rates.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="title description" font-family="sans-serif">',
        f'  <title id="title">{escape(title)}</title>',
        f'  <desc id="description">{escape(description)}</desc>',
        f"  <style>{STYLE}</style>",
        f'  <rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>',
        f'  <text class="title" x="24" y="36">{escape(title)}</text>',
        f'  <text class="text" x="24" y="60">{escape(note)}</text>',
    ]
    for number, (name, rate) in enumerate(rates.items()):
        top = TOP + number * (BAR + GAP)
        length = (WIDTH - LEFT - RIGHT) * rate / max(rates.values())
        middle = top + BAR / 2 + 5
        parts += [
            f'  <text class="text" x="{LEFT - 12}" y="{middle:g}" text-anchor="end">{escape(name)}</text>',
            f'  <rect class="{"plan" if number else "plain"}" x="{LEFT}" y="{top}" width="{length:.1f}" '
            f'height="{BAR}" rx="4"/>',
            f'  <text class="number" x="{LEFT + length + 12:.1f}" y="{middle:g}">{rate:.1f} tokens/s</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="what hierspec generate --check --json printed")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    chosen = parser.parse_args(arguments)
    with whole_file(chosen.picture) as temporary:
        temporary.write_text(drawing(json.loads(chosen.record.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
