"""Whether the text is the same: identical answers, first differences, the distribution of samples; and outliers."""

from __future__ import annotations

from hierspec_bench.page.figures import NOTHING, counted, exact, section, table, tagged
from hierspec_bench.page.markup import Child, Html, element, joined
from hierspec_bench.record import PEER, PLAIN, Entry, Record, Setting

_UNLIKELY = 0.01  # smaller p-values are pointed out; with many plans, one in a hundred is below it by chance


def sameness_sections(record: Record) -> list[Html | None]:
    return [_sameness(record), _outliers(record)]


def _sameness(record: Record) -> Html | None:
    parts = [part for part in (_identical(record), _differences(record), _distribution(record)) if part is not None]
    return section("same", "The same text?", *parts) if parts else None


def _every(record: Record) -> list[tuple[Setting, Entry]]:
    return [(setting, entry) for setting in record.settings for entry in setting.entries]


def _identical(record: Record) -> Html | None:
    """A row for each plan, a column for each temperature."""
    rows: dict[str, list[Child]] = {}
    for column, setting in enumerate(record.settings):
        for entry in setting.entries:
            if entry.kind != PLAIN and entry.figures.identical is not None:
                row = rows.setdefault(entry.name, [tagged(entry), *(NOTHING for _ in record.settings)])
                row[column + 1] = _verdict(entry)
    if not rows:
        return None
    caption = "Answers equal to plain decoding's, token by token, compared before any time counts"
    several = len(record.settings) > 1
    heads = [f"at temperature {exact(setting.temperature)}" if several else "identical" for setting in record.settings]
    return _card(table(caption, ["plan", *heads], list(rows.values()), texts=range(1 + len(heads))))


def _verdict(entry: Entry) -> Child:
    figures = entry.figures
    text = f"{figures.identical or 0:,} of {figures.prompts or 0:,}"
    if figures.ties and figures.identical != figures.prompts:
        text += f", {figures.ties:,} at a tie"
    if figures.different <= 0:
        return element("span", f"{text} ✓", class_="good")
    if entry.kind == PEER:
        return text
    if not entry.promises_text:
        return [text, element("span", " (promises the distribution, not the text)", class_="muted")]
    return element("span", f"{text}: differs", class_="bad")


def _card(inner: Html) -> Html:
    return element("div", inner, class_="card")


def _differences(record: Record) -> Html | None:
    rows: list[list[Child]] = []
    sentences: list[Child] = []
    for setting, entry in _every(record):
        for difference in entry.first_differences:
            where = exact(difference.prompt), exact(difference.position), " / ".join(difference.tokens)
            tie = exact(difference.gap), "tie" if difference.tie else ""
            rows.append([tagged(entry), exact(setting.temperature), difference.task, *where, *tie])
        if not entry.first_differences:
            sentences += [element("li", element("b", entry.name), " ", text) for text in entry.differences]
    if not rows and not sentences:
        return None
    parts: list[Child] = []
    if rows:
        caption = "Where texts first differ: plain's token, the other's, and the gap between the two best logits there"
        heads = ["plan", "temperature", "task", "prompt", "position", "tokens", "gap", ""]
        parts.append(table(caption, heads, rows, texts=(0, 2, 5, 7)))
    if sentences:
        parts.append(element("ul", *sentences, class_="plainlist"))
    total = len(rows) + len(sentences)
    return _card(element("details", element("summary", f"First differences ({total})"), *parts, open=total <= 12))


def _distribution(record: Record) -> Html | None:
    rows: list[list[Child]] = []
    methods: dict[str, None] = {}
    for setting, entry in _every(record):
        test = entry.distribution
        if test.p is None:
            continue
        what = f"look here: {test.striking}" if test.striking else "look here"
        verdict = element("span", what, class_="bad") if test.p < _UNLIKELY else "no sign of another distribution"
        figures = f"{test.p:.3g}", exact(test.statistic), exact(test.tokens)
        rows.append([tagged(entry), exact(setting.temperature), *figures, verdict])
        if test.method:
            methods[test.method] = None
    if not rows:
        return None
    caption = (
        "Sampled tokens against plain's: a permutation test of the distribution (pointed out where p is under "
        f"{_UNLIKELY:g})"
    )
    inner = table(caption, ["plan", "temperature", "p", "statistic", "tokens", ""], rows, texts=(0, 5))
    notes = [element("p", f"Method: {method}.", class_="caption note") for method in methods]
    return _card(joined(inner, *notes))


def _outliers(record: Record) -> Html | None:
    entries = [(setting, entry) for setting, entry in _every(record) if entry.outliers is not None]
    rows: list[list[Child]] = []
    for setting, entry in entries:
        for outlier in entry.outliers or ():
            speed, usual = outlier.tokens_per_second, outlier.usual
            ratio = f"{speed / usual:.2f}×" if speed is not None and usual else NOTHING
            where = exact(setting.temperature), outlier.task, exact(outlier.prompt)
            rows.append([tagged(entry), *where, exact(speed), exact(usual), ratio])
    if not entries:
        return None
    if not rows:
        return section("outliers", "Outliers", element("p", "No prompt's time stood out.", class_="lead"))
    caption = f"{counted(len(rows), 'time')} that stood out. They are shown and count like all others"
    heads = ["plan", "temperature", "task", "prompt", "tokens/s", "usual", "of usual"]
    return section("outliers", "Outliers", _card(table(caption, heads, rows, texts=(0, 2))))
