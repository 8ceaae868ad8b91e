"""The whole page: style and script inline, and a policy that lets a browser load nothing else."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from hierspec.plot import COLOURS, DARK_COLOURS
from hierspec_bench.page.head import head, sentence
from hierspec_bench.page.inside import inside_sections
from hierspec_bench.page.markup import Html, element
from hierspec_bench.page.peers import peers_section
from hierspec_bench.page.sameness import sameness_sections
from hierspec_bench.page.speed import speed_sections
from hierspec_bench.page.texts import source_looks, text_section
from hierspec_bench.record import Record

_UNDERLINES = ("solid", "dashed", "dotted", "double", "wavy")


def report_page(record: Record) -> str:
    """The page of one bench record, as text."""
    looks = source_looks(record)
    speedups, *rates = speed_sections(record)
    sections = [
        speedups,
        text_section(record, looks),
        *rates,
        *inside_sections(record, looks),
        *sameness_sections(record),
        peers_section(record),
    ]
    style, script = _colours() + _own("style.css"), _own("script.js")
    # Hashes instead of 'unsafe-inline': an injected style or script would not run.
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    toggle = element("button", "Dark or light", type="button", id="theme", hidden=True)
    title = f"hierspec bench: {record.document.get('model', 'report')}"
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="description", content=sentence(record)),
            element("link", rel="icon", href="data:,"),
            element("title", title),
            Html(f"<style>{style}</style>"),
        ),
        element(
            "body",
            toggle,
            _hatching(),
            head(record),
            element("main", *(part for part in sections if part is not None)),
            element("footer", "Made by hierspec bench. This page loads nothing and sends nothing."),
            Html(f"<script>{script}</script>"),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{page}\n"


def _own(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _colours() -> str:
    """The colours of `hierspec.plot` for lines, bars and drafted text, with an underline as a second sign."""
    rules = [
        f"--s{index}: light-dark({light}, {dark});"
        for index, (light, dark) in enumerate(zip(COLOURS, DARK_COLOURS, strict=True))
    ]
    lines = [":root {", *rules, "}"]
    for index in range(len(COLOURS)):
        lines.append(f".s{index} {{ --own: var(--s{index}); }}")
    for index in range(len(COLOURS) * len(_UNDERLINES)):
        colour, kind = index % len(COLOURS), _UNDERLINES[(index + index // len(COLOURS)) % len(_UNDERLINES)]
        lines.append(f".g{index} {{ --own: var(--s{colour}); text-decoration-style: {kind}; }}")
    return "\n".join([*lines, ""])


def _hatching() -> Html:
    """The hatching of other engines' bars, so that colour is not the only sign."""
    line = element("path", d="M0 0V6", class_="hatch")
    ground = element("rect", width=6, height=6, class_="hatch-ground")
    units = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    pattern = element("pattern", ground, line, id="hatch", width=6, height=6, **units)
    return element("svg", element("defs", pattern), class_="nowhere", width=0, height=0, aria_hidden="true")
