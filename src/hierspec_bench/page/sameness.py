"""Is it the same text? Identical answers, first differences, the law of sampled tokens; and times that stand out."""

from __future__ import annotations

from hierspec_bench.page.figures import NOTHING, counted, exact, section, table
from hierspec_bench.page.markup import Child, Html, element, joined
from hierspec_bench.page.reading import PEER, PLAIN, Entry, Run, Setting, items, mapping, mappings, real

_UNLIKELY = 0.01  # a p-value below it is pointed out; with many plans one in a hundred comes by chance


def sameness_sections(run: Run) -> list[Html | None]:
    return [_sameness(run), _outliers(run)]


def _sameness(run: Run) -> Html | None:
    parts = [part for part in (_identical(run), _differences(run), _distribution(run)) if part is not None]
    return section("same", "The same text?", *parts) if parts else None


def _every(run: Run) -> list[tuple[Setting, Entry]]:
    return [(setting, entry) for setting in run.settings for entry in setting.entries]


def _who(entry: Entry) -> Child:
    return [entry.name, element("span", "peer", class_="tag") if entry.kind == PEER else None]


def _identical(run: Run) -> Html | None:
    """A row for each plan, a column for each temperature."""
    rows: dict[str, list[Child]] = {}
    for place, setting in enumerate(run.settings):
        for entry in setting.entries:
            if entry.kind != PLAIN and entry.number("identical") is not None:
                row = rows.setdefault(entry.name, [_who(entry), *(NOTHING for _ in run.settings)])
                row[place + 1] = _verdict(entry)
    if not rows:
        return None
    said = "Answers equal to plain decoding's, token by token, compared before any time counts"
    several = len(run.settings) > 1
    heads = [f"at temperature {exact(s.temperature)}" if several else "identical" for s in run.settings]
    return _card(table(said, ["plan", *heads], list(rows.values()), texts=range(1 + len(heads))))


def _verdict(entry: Entry) -> Child:
    same, whole, ties = (entry.number(key) or 0.0 for key in ("identical", "prompts", "ties"))
    count = f"{same:,.0f} of {whole:,.0f}"
    if same == whole:
        return element("span", f"{count} ✓", class_="good")
    if ties:
        count += f", {ties:,.0f} at a tie"
    if same + ties >= whole:
        return element("span", f"{count} ✓", class_="good")
    if entry.kind == PEER:
        return count
    if entry.figures.get("promises_text") is False:
        return [count, element("span", " (promises the law, not the text)", class_="muted")]
    return element("span", f"{count}: differs", class_="bad")


def _card(inner: Html) -> Html:
    return element("div", inner, class_="card")


def _differences(run: Run) -> Html | None:
    rows: list[list[Child]] = []
    old: list[Child] = []
    for setting, entry in _every(run):
        told = mappings(entry.figures.get("first_differences"))
        for difference in told:
            tokens = [str(token) for token in items(difference.get("tokens"))]
            rows.append([
                _who(entry), exact(setting.temperature), str(difference.get("task", "")),
                exact(difference.get("prompt")), exact(difference.get("position")), " / ".join(tokens),
                exact(difference.get("gap")), "tie" if difference.get("tie") else "",
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
        heads = ["plan", "temperature", "task", "prompt", "position", "tokens", "gap", ""]
        parts.append(table(said, heads, rows, texts=(0, 2, 5, 7)))
    if old:
        parts.append(element("ul", *old, class_="plainlist"))
    where = "First differences" + (f" ({len(rows) + len(old)})")
    return _card(element("details", element("summary", where), *parts, open=len(rows) + len(old) <= 12))


def _distribution(run: Run) -> Html | None:
    rows: list[list[Child]] = []
    methods: dict[str, None] = {}
    for setting, entry in _every(run):
        distribution = mapping(entry.figures.get("law"))
        chance = real(distribution.get("p"))
        if chance is None:
            continue
        what = f"look here: {distribution['striking']}" if distribution.get("striking") else "look here"
        verdict = element("span", what, class_="bad") if chance < _UNLIKELY else "no sign of another distribution"
        rows.append([
            _who(entry), exact(setting.temperature), f"{chance:.3g}", exact(distribution.get("statistic")),
            exact(distribution.get("tokens")), verdict,
        ])  # fmt: skip
        if distribution.get("method"):
            methods[str(distribution["method"])] = None
    if not rows:
        return None
    said = f"Sampled tokens against plain's: a two-sample test of the law (pointed out where p is under {_UNLIKELY:g})"
    told = table(said, ["plan", "temperature", "p", "statistic", "tokens", ""], rows, texts=(0, 5))
    notes = [element("p", f"Method: {method}.", class_="caption note") for method in methods]
    return _card(joined(told, *notes))


def _outliers(run: Run) -> Html | None:
    rows: list[list[Child]] = []
    known = any("outliers" in entry.figures for _, entry in _every(run))
    for setting, entry in _every(run):
        for outlier in mappings(entry.figures.get("outliers")):
            speed, usual = real(outlier.get("tokens_per_second")), real(outlier.get("usual"))
            ratio = f"{speed / usual:.2f}×" if speed is not None and usual else NOTHING
            rows.append([
                _who(entry), exact(setting.temperature), str(outlier.get("task", "")), exact(outlier.get("prompt")),
                exact(outlier.get("tokens_per_second")), exact(outlier.get("usual")), ratio,
            ])  # fmt: skip
    if not known:
        return None
    if not rows:
        return section("outliers", "Outliers", element("p", "No prompt's time stood out.", class_="lead"))
    said = f"{counted(len(rows), 'time')} that stood out. They are shown and count like all others"
    heads = ["plan", "temperature", "task", "prompt", "tokens/s", "usual", "of usual"]
    return section("outliers", "Outliers", _card(table(said, heads, rows, texts=(0, 2))))
