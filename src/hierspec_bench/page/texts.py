"""The answers themselves, coloured by who guessed each piece; colour is never the only sign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from hierspec_bench.page.figures import counted, percent, section
from hierspec_bench.page.markup import Child, Html, element
from hierspec_bench.page.reading import Run, items, mapping, mappings, real

_OWN = "target"  # the source of tokens that nobody guessed
_BEGINS = 40  # characters of a question, where prompts are chosen
_LOOKS = 30  # classes of the style sheet: six colours with five kinds of underline


def source_looks(run: Run) -> dict[str, str]:
    """A class for every source, the commonest first, the same all over the page."""
    counts: Counter[str] = Counter()
    for entry in run.main.entries:
        for tier in mappings(entry.figures.get("tiers")):
            counts.update(dict.fromkeys(map(str, mapping(tier.get("proposed"))), 1))
    for _, _, pieces in _answers(run):
        counts.update({source for _, source, _ in pieces})
    counts.pop(_OWN, None)
    return {_OWN: "own"} | {source: f"g{place % _LOOKS}" for place, (source, _) in enumerate(counts.most_common())}


def text_section(run: Run, looks: Mapping[str, str]) -> Html | None:
    texts = [text for text in mappings(run.document.get("texts")) if mapping(text.get("answers"))]
    if not texts:
        return None
    plans = list(dict.fromkeys(str(plan) for text in texts for plan in mapping(text["answers"])))
    first = run.best.name if run.best is not None and run.best.name in mapping(texts[0]["answers"]) else None
    first = first or next(iter(mapping(texts[0]["answers"])))
    shown = plans.index(str(first))
    prompts = _prompt_names(texts)
    chosen: list[Child] = [
        _choice("prompt", "Prompt", prompts, 0),
        _choice("plan", "Plan", plans, shown),
    ]
    parts: list[Child] = []
    for place, text in enumerate(texts):
        asked = element("blockquote", str(text.get("asked", "")), class_="asked")
        parts.append(element("div", element("h3", f"Asked: {prompts[place]}"), asked, data_prompt=place,
                             hidden=place != 0))  # fmt: skip
    for place, text in enumerate(texts):
        for plan, pieces in mapping(text["answers"]).items():
            number = plans.index(str(plan))
            hidden = (place, number) != (0, shown)
            parts.append(_answer(str(plan), _pieces(pieces), looks, place, number, hidden))
    missing = element("p", "This plan has no answer to this prompt.", class_="muted", id="no-answer", hidden=True)
    lead = element(
        "p",
        "The model judged every piece before it was written; the marks only tell who guessed it first. "
        "Pieces without a mark were written by the model's own passes.",
        class_="lead",
    )
    status = element("output", "Point at a piece, or step through them with the arrow keys.", id="piece",
                     class_="muted", hidden=True)  # fmt: skip
    choices = element("div", *chosen, class_="choices", id="choices", hidden=True)
    return section("text", "The text, by who guessed it", lead, choices, *parts, missing, status)


def _prompt_names(texts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Task, number within it, and how the question begins."""
    seen: Counter[str] = Counter()
    names = []
    for text in texts:
        task = str(text.get("task") or "prompt")
        seen[task] += 1
        begins = " ".join(str(text.get("asked", "")).split())
        begins = begins if len(begins) <= _BEGINS else begins[:_BEGINS].rstrip() + "…"
        names.append(f"{task} {seen[task]}" + (f": {begins}" if begins else ""))
    return names


def _choice(key: str, title: str, names: Sequence[str], chosen: int) -> Html:
    options = [element("option", name, value=place, selected=place == chosen) for place, name in enumerate(names)]
    return element("label", title, element("select", *options, id=f"choose-{key}"))


def _answers(run: Run) -> list[tuple[int, str, list[tuple[str, str, int]]]]:
    return [
        (place, str(plan), _pieces(pieces))
        for place, text in enumerate(mappings(run.document.get("texts")))
        for plan, pieces in mapping(text.get("answers")).items()
    ]


def _pieces(pieces: object) -> list[tuple[str, str, int]]:
    """Text, who guessed it, and tokens; older records have a piece for every token."""
    found = [items(piece) for piece in items(pieces)]
    return [
        (str(piece[0]), str(piece[1]), int(real(piece[2]) or 1) if len(piece) == 3 else 1)
        for piece in found
        if len(piece) in (2, 3)
    ]


def _answer(
    plan: str, pieces: Sequence[tuple[str, str, int]], looks: Mapping[str, str], prompt: int, number: int, hidden: bool
) -> Html:
    runs: list[Child] = []
    counts: Counter[str] = Counter()
    for source, group in groupby(pieces, key=lambda piece: piece[1]):
        together = list(group)
        tokens = sum(count for _, _, count in together)
        counts[source] += tokens
        said = "the model itself" if source == _OWN else f"guessed by {source}"
        words = "".join(text for text, _, _ in together)
        title = f"{said}, {counted(tokens, 'token')}"
        runs.append(element("span", words, class_=f"run {looks.get(source, 'own')}", title=title))
    whole = max(1, counts.total())
    keys = []
    for source, count in sorted(counts.items(), key=lambda pair: (pair[0] == _OWN, -pair[1])):
        name = "the model itself" if source == _OWN else source
        mark = element("span", "ab", class_=f"run {looks.get(source, 'own')}", aria_hidden="true")
        share = element("b", percent(count / whole))
        pressed = element("button", mark, f" {name} ", share, type="button", aria_pressed="false",
                          data_look=looks.get(source, "own"), disabled=True)  # fmt: skip
        keys.append(element("li", pressed))
    answer = element("div", *runs, class_="words", tabindex=0, role="group", aria_label=f"Answer of {plan}",
                    aria_describedby="piece")  # fmt: skip
    return element("article", element("h3", f"Answer: {plan}"), answer, element("ul", *keys, class_="keys"),
                   class_="answer", data_prompt=prompt, data_plan=number, hidden=hidden)  # fmt: skip
