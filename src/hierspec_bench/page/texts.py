"""The answers, coloured by the source that drafted each piece; colour is never the only sign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from hierspec_bench.page.figures import counted, percent, section
from hierspec_bench.page.markup import Child, Html, element
from hierspec_bench.record import Answers, Piece, Record

_TARGET = "target"  # the source of tokens that were not drafted
_BEGINS = 40  # characters of a question shown in the list of prompts
_LOOKS = 60  # classes of the style sheet: twelve colours with five kinds of underline


def source_looks(record: Record) -> dict[str, str]:
    """A class for every source, the most frequent first, the same on the whole page."""
    counts: Counter[str] = Counter()
    for entry in record.main.entries:
        for tier in entry.tiers:
            counts.update(dict.fromkeys(tier.proposed, 1))
    for answers in record.answers:
        for pieces in answers.by_plan.values():
            counts.update({piece.source for piece in pieces})
    counts.pop(_TARGET, None)
    return {_TARGET: "own"} | {source: f"g{index % _LOOKS}" for index, (source, _) in enumerate(counts.most_common())}


def text_section(record: Record, looks: Mapping[str, str]) -> Html | None:
    texts = record.answers
    if not texts:
        return None
    plans = list(dict.fromkeys(plan for text in texts for plan in text.by_plan))
    first = record.best.name if record.best is not None else ""
    shown = plans.index(first if first in texts[0].by_plan else next(iter(texts[0].by_plan)))
    prompts = _prompt_names(texts)
    choices = [_choice("prompt", "Prompt", prompts, 0), _choice("plan", "Plan", plans, shown)]
    parts: list[Child] = []
    for prompt, text in enumerate(texts):
        question = element("blockquote", text.asked, class_="asked")
        heading = element("h3", f"Asked: {prompts[prompt]}")
        parts.append(element("div", heading, question, data_prompt=prompt, hidden=prompt != 0))
    for prompt, text in enumerate(texts):
        for plan, pieces in text.by_plan.items():
            chosen = {"data_prompt": prompt, "data_plan": plans.index(plan)}
            answer = _answer(plan, pieces, looks)
            hidden = (prompt, plans.index(plan)) != (0, shown)
            parts.append(element("article", *answer, class_="answer", **chosen, hidden=hidden))
    missing = element("p", "This plan has no answer to this prompt.", class_="muted", id="no-answer", hidden=True)
    lead = element(
        "p",
        "The model verified every piece before it was written; the marks only tell who drafted it. "
        "Pieces without a mark were written by the model's own passes.",
        class_="lead",
    )
    hint = "Point at a piece, or step through them with the arrow keys."
    status = element("output", hint, id="piece", class_="muted", hidden=True)
    chooser = element("div", *choices, class_="choices", id="choices", hidden=True)
    return section("text", "The text, by who drafted it", lead, chooser, *parts, missing, status)


def _prompt_names(texts: Sequence[Answers]) -> list[str]:
    """Names of prompts: task, number within it, and the start of the question."""
    seen: Counter[str] = Counter()
    names = []
    for text in texts:
        seen[text.task] += 1
        begins = " ".join(text.asked.split())
        begins = begins if len(begins) <= _BEGINS else begins[:_BEGINS].rstrip() + "…"
        names.append(f"{text.task} {seen[text.task]}" + (f": {begins}" if begins else ""))
    return names


def _choice(key: str, title: str, names: Sequence[str], chosen: int) -> Html:
    options = [element("option", name, value=index, selected=index == chosen) for index, name in enumerate(names)]
    return element("label", title, element("select", *options, id=f"choose-{key}"))


def _answer(plan: str, pieces: Sequence[Piece], looks: Mapping[str, str]) -> list[Child]:
    """Heading, text and legend."""
    runs: list[Child] = []
    counts: Counter[str] = Counter()
    for source, group in groupby(pieces, key=lambda piece: piece.source):
        together = list(group)
        tokens = sum(piece.tokens for piece in together)
        counts[source] += tokens
        writer = "the model itself" if source == _TARGET else f"drafted by {source}"
        words = "".join(piece.text for piece in together)
        title = f"{writer}, {counted(tokens, 'token')}"
        runs.append(element("span", words, class_=f"run {looks.get(source, 'own')}", title=title))
    total = max(1, counts.total())
    keys = []
    for source, count in sorted(counts.items(), key=lambda pair: (pair[0] == _TARGET, -pair[1])):
        look, name = looks.get(source, "own"), "the model itself" if source == _TARGET else source
        mark = element("span", "ab", class_=f"run {look}", aria_hidden="true")
        label = (mark, f" {name} ", element("b", percent(count / total)))
        button = element("button", *label, type="button", aria_pressed="false", data_look=look, disabled=True)
        keys.append(element("li", button))
    attributes = {"role": "group", "aria_label": f"Answer of {plan}", "aria_describedby": "piece"}
    text = element("div", *runs, class_="words", tabindex=0, **attributes)
    return [element("h3", f"Answer: {plan}"), text, element("ul", *keys, class_="keys")]
