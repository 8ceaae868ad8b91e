"""Is it the same text? Identical answers, first differences, the law of sampled tokens; and times that stand out."""

from __future__ import annotations

from hierspec.bench.report_page.figures import NOTHING, counted, exact, section, table
from hierspec.bench.report_page.markup import Child, Html, element
from hierspec.bench.report_page.reading import PEER, PLAIN, Entry, Run, Setting, items, mapping, mappings, real

_UNLIKELY = 0.01  # a p-value below it is pointed out; with many plans one in a hundred comes by chance


def sameness_sections(run: Run) -> list[Html | None]:
    return [_sameness(run), _outliers(run)]


def _sameness(run: Run) -> Html | None:
    parts = [part for part in (_identical(run), _differences(run), _law(run)) if part is not None]
    return section("same", "The same text?", *parts) if parts else None


def _every(run: Run) -> list[tuple[Setting, Entry]]:
    return [(setting, entry) for setting in run.settings for entry in setting.entries]


def _who(run: Run, setting: Setting, entry: Entry) -> Child:
    place = f" at temperature {exact(setting.temperature)}" if len(run.settings) > 1 else ""
    return [entry.name + place, element("span", "peer", class_="tag") if entry.kind == PEER else None]


def _identical(run: Run) -> Html | None:
    rows: list[list[Child]] = []
    for setting, entry in _every(run):
        same, whole = entry.number("identical"), entry.number("prompts")
        if entry.kind == PLAIN or same is None or whole is None:
            continue
        ties = int(entry.number("ties") or 0)
        if same == whole:
            verdict = element("span", "all identical", class_="good")
        elif same + ties >= whole:
            verdict = element("span", "differs only at ties", class_="good")
        elif entry.kind == PEER:
            verdict = element("span", "other arithmetic, other text", class_="muted")
        elif entry.figures.get("promises_text") is False:
            verdict = element("span", "promises the law, not the text", class_="muted")
        else:
            verdict = element("span", "differs", class_="bad")
        rows.append([_who(run, setting, entry), f"{same:,.0f} of {whole:,.0f}", f"{ties:,}", verdict])
    if not rows:
        return None
    said = "Answers equal to plain decoding's, token by token, compared before any time counts"
    return table(said, ["plan", "identical", "ties", ""], rows, texts=(0, 3))


def _differences(run: Run) -> Html | None:
    rows: list[list[Child]] = []
    old: list[Child] = []
    for setting, entry in _every(run):
        told = mappings(entry.figures.get("first_differences"))
        for difference in told:
            tokens = [str(token) for token in items(difference.get("tokens"))]
            rows.append([
                _who(run, setting, entry), str(difference.get("task", "")), exact(difference.get("prompt")),
                exact(difference.get("position")), " / ".join(tokens), exact(difference.get("gap")),
                "tie" if difference.get("tie") else "",
            ])  # fmt: skip
        if not told:
            old += [
                element("li", element("b", entry.name), " ", str(text))
                for text in items(entry.figures.get("differences"))
            ]
    if not rows and not old:
        return None
    parts: list[Child] = []
    if rows:
        said = "Where texts first part: plain's token, the other's, and the gap between the two best logits there"
        heads = ["plan", "task", "prompt", "position", "tokens", "gap", ""]
        parts.append(table(said, heads, rows, texts=(0, 1, 4, 6)))
    if old:
        parts.append(element("ul", *old, class_="plainlist"))
    where = "First differences" + (f" ({len(rows) + len(old)})")
    return element("details", element("summary", where), *parts)


def _law(run: Run) -> Html | None:
    rows: list[list[Child]] = []
    for setting, entry in _every(run):
        law = mapping(entry.figures.get("law"))
        chance = real(law.get("p"))
        if chance is None:
            continue
        verdict = (
            element("span", "look here", class_="bad")
            if chance < _UNLIKELY
            else element("span", "no sign of another law", class_="good")
        )
        rows.append([
            _who(run, setting, entry), f"{chance:.3g}", exact(law.get("statistic")), exact(law.get("tokens")), verdict,
            str(law.get("method", NOTHING)),
        ])  # fmt: skip
    if not rows:
        return None
    said = f"Sampled tokens against plain's: a two-sample test of the law (pointed out where p is under {_UNLIKELY:g})"
    return table(said, ["plan", "p", "statistic", "tokens", "", "method"], rows, texts=(0, 4, 5))


def _outliers(run: Run) -> Html | None:
    rows: list[list[Child]] = []
    known = any("outliers" in entry.figures for _, entry in _every(run))
    for setting, entry in _every(run):
        for outlier in mappings(entry.figures.get("outliers")):
            speed, usual = real(outlier.get("tokens_per_second")), real(outlier.get("usual"))
            ratio = f"{speed / usual:.2f}×" if speed is not None and usual else NOTHING
            rows.append([
                _who(run, setting, entry), str(outlier.get("task", "")), exact(outlier.get("prompt")),
                exact(outlier.get("tokens_per_second")), exact(outlier.get("usual")), ratio,
            ])  # fmt: skip
    if not known:
        return None
    if not rows:
        return section("outliers", "Outliers", element("p", "No prompt's time stood out.", class_="lead"))
    said = f"{counted(len(rows), 'time')} that stood out. They are shown and count like all others"
    heads = ["plan", "task", "prompt", "tokens/s", "usual", "of usual"]
    return section("outliers", "Outliers", table(said, heads, rows, texts=(0, 1)))
