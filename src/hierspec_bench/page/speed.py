"""Speed: against plain decoding and other engines, by task, in tokens per second and by temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hierspec.plot import COLOURS, Axis
from hierspec_bench.page.charts import Bar, Curve, Part, bar_chart, bar_scale, curve_chart, legend
from hierspec_bench.page.figures import exact, figure, look, rate, section, table, tag, tagged, times
from hierspec_bench.page.markup import Html, element
from hierspec_bench.record import PEER, PLAIN, Entry, Record, fastest


def speed_sections(record: Record) -> list[Html | None]:
    return [_speedups(record), _rates(record), _temperatures(record)]


def _speedups(record: Record) -> Html | None:
    entries = record.main.entries
    overall = _speedup_bars(record, entries)
    if not overall:
        return None
    by_task = {task: _speedup_bars(record, [entry.in_task(task) for entry in entries]) for task in record.tasks}
    scale = bar_scale([bar for bars in (overall, *by_task.values()) for bar in bars], 1.0)
    keys = [("fastest plan", "best"), ("other plans", "plan"), ("plain decoding", PLAIN)]
    if record.main.named(PEER):
        keys.append(("baselines: other engines on the same prompts", PEER))
    caption = "Tokens per second over those of plain decoding on the same prompts, prefill included."
    if any(bar.high is not None for bar in overall):
        caption += " Whiskers are 95% bootstrap intervals over prompts."
    if not all(entry.alone for entry in entries):
        caption += " Batches answer several prompts at once; the fastest plan is sought among those that answer one."
    chart = bar_chart(overall, scale, "× plain", 1.0)
    charts = [figure(caption, legend(keys), chart, title="All prompts", wide=True)]
    if (beside := _against_peers(record)) is not None:
        charts.append(beside)
    if len(by_task) > 1:
        charts += [
            figure("", bar_chart(bars, scale, "× plain", 1.0), title=task) for task, bars in by_task.items() if bars
        ]
    return section("speed", "Speed-up", element("div", *charts, class_="cards"))


def _against_peers(record: Record) -> Html | None:
    """Our fastest plan beside the fastest other engine of each task, even if ours is slower."""
    best, peers = record.best, record.main.named(PEER)
    if best is None or not peers:
        return None
    rows = []
    for task in (None, *record.tasks):
        ours = best if task is None else best.in_task(task)
        theirs = fastest(peers if task is None else [peer.in_task(task) for peer in peers])
        if theirs is None or (ratio := ours.over(theirs)) is None:
            continue
        mark = element("span", "ahead", class_="good") if ratio > 1 else element("span", "behind", class_="bad")
        interval = best.interval_over(next(peer for peer in peers if peer.name == theirs.name), task)
        within = f"{interval[0]:.2f}–{interval[1]:.2f}" if interval else ""
        rates = rate(ours.figures.tokens_per_second), rate(theirs.figures.tokens_per_second)
        rows.append([task or "all prompts", times(ratio), within, mark, *rates, theirs.name])
    heads = ["task", "ratio", "95%", "", best.name, "fastest other", "which"]
    caption = "Tokens per second of our fastest plan and of the other engine that is fastest at the task."
    inner = table("", heads, rows, texts=(0, 3, 6))
    return figure(caption, inner, title="Beside the fastest other engine of each task", wide=True)


def _speedup_bars(record: Record, entries: Sequence[Entry]) -> list[Bar]:
    bars = []
    for entry in entries:
        value = entry.figures.speedup
        if value is None:
            continue
        interval = None if entry.kind == PLAIN else entry.figures.speedup_interval  # plain is the reference
        low, high = interval or (None, None)
        beside = f"{low:.2f}–{high:.2f}" if low is not None and high is not None else ""
        parts = (Part(value, look(entry, record.best)),)
        bars.append(Bar(entry.name, parts, times(value), tag(entry), low, high, beside))
    return bars


def _rates(record: Record) -> Html | None:
    entries = [entry for entry in record.main.entries if entry.figures.tokens_per_second is not None]
    if not entries:
        return None
    whole = _bars(record, entries, "tokens_per_second")
    decoding = _bars(record, entries, "decode_tokens_per_second")
    scale = bar_scale([*whole, *decoding])
    caption = "All tokens over all seconds, from the question to the last token."
    charts = [figure(caption, bar_chart(whole, scale, "tokens/s"), title="Tokens per second, prefill included")]
    if decoding:
        caption = "After the first step, which is the prefill. The same scale as the chart before it."
        chart = bar_chart(decoding, scale, "tokens/s")
        charts.append(figure(caption, chart, title="Tokens per second, decoding alone"))
    if prefill := _prefill(entries):
        charts.append(prefill)
    passes = _bars(record, entries, "tokens_per_pass", "{:.2f}".format)
    if passes:
        caption = "Tokens per pass of the model itself: plain decoding writes one. Other engines do not tell."
        chart = bar_chart(passes, bar_scale(passes, 1.0), "a pass", 1.0)
        charts.append(figure(caption, chart, title="Tokens per pass"))
    return section("rates", "Tokens per second", element("div", *charts, class_="cards pairs"), _all_figures(record))


def _bars(
    record: Record, entries: Sequence[Entry], key: str, shown: Callable[[float], str] = lambda value: rate(value)
) -> list[Bar]:
    return [
        Bar(entry.name, (Part(value, look(entry, record.best)),), shown(value), tag(entry))
        for entry in entries
        if (value := getattr(entry.figures, key)) is not None
    ]


def _prefill(entries: Sequence[Entry]) -> Html | None:
    bars = []
    for entry in entries:
        prefill, decoding = entry.figures.prefill_seconds, entry.figures.decode_seconds
        if prefill is not None and decoding is not None:
            parts = (Part(prefill, "time-0", "prefill"), Part(decoding, "time-1", "decoding"))
            bars.append(Bar(entry.name, parts, f"{prefill:,.1f} + {decoding:,.1f}", tag(entry)))
    if not bars:
        return None
    keys = legend([("prefill", "time-0"), ("decoding", "time-1")])
    caption = "Seconds for all prompts: prefill, then decoding. Speculation shortens only the second part."
    return figure(caption, keys, bar_chart(bars, bar_scale(bars), "s"), title="Prefill and decoding")


_COLUMNS = (
    ("tokens/s", "tokens_per_second"),
    ("median tokens/s", "median_tokens_per_second"),
    ("decoding tokens/s", "decode_tokens_per_second"),
    ("speed-up", "speedup"),
    ("tokens a pass", "tokens_per_pass"),
    ("overhead ms a pass", "overhead_ms_per_pass"),
    ("prefill s", "prefill_seconds"),
    ("decoding s", "decode_seconds"),
    ("seconds", "seconds"),
    ("tokens", "tokens"),
    ("GB/s", "gigabytes_per_second"),
)


def _all_figures(record: Record) -> Html:
    """Every figure as the record has it."""
    entries = record.main.entries
    columns = [pair for pair in _COLUMNS if any(getattr(entry.figures, pair[1]) is not None for entry in entries)]
    rows = [[tagged(entry), *(exact(getattr(entry.figures, key)) for _, key in columns)] for entry in entries]
    inner = table("", ["plan", *(name for name, _ in columns)], rows)
    return element("details", element("summary", "All of these as figures"), inner)


def _temperatures(record: Record) -> Html | None:
    """Plans and other engines in separate charts, and never more curves per chart than colours."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}  # by title of the chart and name
    for setting in record.settings:
        for entry in setting.entries:
            value = entry.figures.tokens_per_second
            if entry.alone and value is not None and setting.temperature is not None:
                title = "Baselines: other engines" if entry.kind == PEER else "Plans"
                points.setdefault((title, entry.name), []).append((setting.temperature, value))
    points = {key: sorted(places) for key, places in points.items() if len({at for at, _ in places}) > 1}
    if not points:
        return None
    every = [place for places in points.values() for place in places]
    scales = Axis("").scale([at for at, _ in every]), Axis("").scale([value for _, value in every])
    looks = {key: f"s{number % len(COLOURS)}" for number, key in enumerate(points)}
    charts = []
    for title in dict.fromkeys(title for title, _ in points):
        curves = [Curve(key[1], tuple(places), looks[key]) for key, places in points.items() if key[0] == title]
        for start in range(0, len(curves), len(COLOURS)):
            part = curves[start : start + len(COLOURS)]
            keys = legend([(curve.name, curve.look) for curve in part])
            charts.append(figure("", keys, curve_chart(f"{title} against temperature", part, *scales), title=title))
    lead = "Tokens per second, prefill included, against the sampling temperature; 0 is greedy. One scale for all."
    cards = element("div", *charts, class_="cards")
    return section("temperatures", "Temperature", element("p", lead, class_="lead"), cards)
