"""How fast: against plain decoding and the peers, by task, in tokens per second and by temperature."""

from __future__ import annotations

from collections.abc import Sequence

from hierspec.plot import COLOURS, Axis
from hierspec_bench.page.charts import Bar, Curve, Part, bar_chart, bar_scale, curve_chart, legend
from hierspec_bench.page.figures import exact, figure, look, rate, section, table, tag, times
from hierspec_bench.page.markup import Html, element
from hierspec_bench.page.reading import PEER, PLAIN, PLAN, Entry, Run, fastest


def speed_sections(run: Run) -> list[Html | None]:
    return [_speedups(run), _rates(run), _temperatures(run)]


def _speedups(run: Run) -> Html | None:
    overall = _speedup_bars(run, run.main.entries)
    if not overall:
        return None
    by_task = {task: _speedup_bars(run, [entry.in_task(task) for entry in run.main.entries]) for task in run.tasks}
    scale = bar_scale([bar for bars in (overall, *by_task.values()) for bar in bars], 1.0)
    keys = [("fastest plan", "best"), ("other plans", "plan"), ("plain decoding", PLAIN)]
    if run.main.named(PEER):
        keys.append(("peers: other programs on the same prompts", PEER))
    whiskers = any(bar.high is not None for bar in overall)
    said = "Tokens per second over those of plain decoding on the same prompts, prefill included."
    said += " Whiskers are 95% bootstrap intervals over prompts." if whiskers else ""
    if not all(entry.alone for entry in run.main.entries):
        said += " Batches answer several prompts side by side; the fastest plan is sought among those that answer one."
    charts = [figure(said, legend(keys), bar_chart(overall, scale, "× plain", 1.0), title="All prompts", wide=True)]
    if (beside := _against_peers(run)) is not None:
        charts.append(beside)
    if len(by_task) > 1:
        charts += [
            figure("", bar_chart(bars, scale, "× plain", 1.0), title=task) for task, bars in by_task.items() if bars
        ]
    return section("speed", "Speed-up", element("div", *charts, class_="cards"))


def _against_peers(run: Run) -> Html | None:
    """Our fastest plan beside the peer that is best at a task: behind is said where it is behind."""
    best = run.best
    if best is None or not run.main.named(PEER):
        return None
    rows = []
    by_name = {peer.name: peer for peer in run.main.named(PEER)}
    for task in (None, *run.tasks):
        ours, peers = best, list(by_name.values())
        if task is not None:
            ours, peers = best.in_task(task), [peer.in_task(task) for peer in peers]
        peer, speed = fastest(peers), ours.number("tokens_per_second")
        theirs = None if peer is None else peer.number("tokens_per_second")
        if peer is not None and theirs and speed is not None:
            mark = (
                element("span", "ahead", class_="good") if speed > theirs else element("span", "behind", class_="bad")
            )
            sure = best.interval_over(by_name[peer.name], task)
            within = f"{sure[0]:.2f}–{sure[1]:.2f}" if sure else ""
            told = (times(speed / theirs), within, mark, rate(speed), rate(theirs), peer.name)
            rows.append([task or "all prompts", *told])
    heads = ["task", "ratio", "95%", "", best.name, "best peer", "which"]
    said = "Tokens per second of our fastest plan and of the peer that is fastest at the task."
    return figure(said, table("", heads, rows, texts=(0, 3, 6)), title="Beside the best peer of each task", wide=True)


def _speedup_bars(run: Run, entries: Sequence[Entry]) -> list[Bar]:
    bars = []
    for entry in entries:
        value, interval = entry.number("speedup"), entry.interval()
        if value is None:
            continue
        interval = None if entry.kind == PLAIN else interval  # it is the measure itself
        low, high = interval or (None, None)
        beside = f"{low:.2f}–{high:.2f}" if low is not None and high is not None else ""
        parts = (Part(value, look(entry, run.best)),)
        bars.append(Bar(entry.name, parts, times(value), tag(entry), low, high, beside))
    return bars


def _rates(run: Run) -> Html | None:
    entries = [entry for entry in run.main.entries if entry.number("tokens_per_second") is not None]
    if not entries:
        return None
    whole = _bars(run, entries, "tokens_per_second")
    decoding = _bars(run, entries, "decode_tokens_per_second")
    scale = bar_scale([*whole, *decoding])
    charts = [
        figure("All tokens over all seconds, from the question to the last token.",
               bar_chart(whole, scale, "tokens/s"), title="Tokens per second, prefill included"),
    ]  # fmt: skip
    if decoding:
        charts.append(
            figure("After the first step, which reads the prompt. The same scale as the chart before it.",
                   bar_chart(decoding, scale, "tokens/s"), title="Tokens per second, decoding alone")
        )  # fmt: skip
    if prefill := _prefill(entries):
        charts.append(prefill)
    passes = _bars(run, entries, "tokens_per_pass", "{:.2f}".format)
    if passes:
        charts.append(
            figure("Tokens written by one pass of the model itself: plain decoding writes one. Peers do not tell.",
                   bar_chart(passes, bar_scale(passes, 1.0), "a pass", 1.0), title="Tokens per pass")
        )  # fmt: skip
    return section("rates", "Tokens per second", element("div", *charts, class_="cards pairs"), _all_figures(run))


def _bars(run: Run, entries: Sequence[Entry], key: str, shown: object = None) -> list[Bar]:
    write = shown if callable(shown) else rate
    return [
        Bar(entry.name, (Part(value, look(entry, run.best)),), write(value), tag(entry))
        for entry in entries
        if (value := entry.number(key)) is not None
    ]


def _prefill(entries: Sequence[Entry]) -> Html | None:
    bars = []
    for entry in entries:
        first, later = entry.number("prefill_seconds"), entry.number("decode_seconds")
        if first is not None and later is not None:
            parts = (Part(first, "time-0", "prefill"), Part(later, "time-1", "decoding"))
            bars.append(Bar(entry.name, parts, f"{first:,.1f} + {later:,.1f}", tag(entry)))
    if not bars:
        return None
    keys = legend([("prefill", "time-0"), ("decoding", "time-1")])
    said = "Seconds for all prompts: reading them, then writing. Speculation makes only the second part shorter."
    return figure(said, keys, bar_chart(bars, bar_scale(bars), "s"), title="Prefill and decoding")


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


def _all_figures(run: Run) -> Html:
    """Every figure as the record has it, for those who want to reckon."""
    columns = [pair for pair in _COLUMNS if any(pair[1] in entry.figures for entry in run.main.entries)]
    rows = [
        [[entry.name, element("span", "peer", class_="tag") if entry.kind == PEER else None],
         *(exact(entry.figures.get(key)) for _, key in columns)]
        for entry in run.main.entries
    ]  # fmt: skip
    inner = table("", ["plan", *(name for name, _ in columns)], rows)
    return element("details", element("summary", "All of these as figures"), inner)


def _temperatures(run: Run) -> Html | None:
    names = list(dict.fromkeys(entry.name for setting in run.settings for entry in setting.entries if entry.alone))
    curves: list[Curve] = []
    for name in names:
        points, kind = [], PLAN
        for setting in run.settings:
            for entry in setting.entries:
                value = entry.number("tokens_per_second")
                if entry.name == name and value is not None and setting.temperature is not None:
                    points.append((setting.temperature, value))
                    kind = entry.kind
        if len({place for place, _ in points}) > 1:
            colour = "plain" if kind == PLAIN else f"s{len(curves) % len(COLOURS)}"
            curves.append(Curve(name, tuple(sorted(points)), colour, kind == PEER))
    if not curves:
        return None
    told = "; ".join(f"{curve.name}: " + ", ".join(f"{b:g} at {a:g}" for a, b in curve.points) for curve in curves)
    keys = legend(
        [
            (curve.name + (" (peer)" if curve.dashed else ""), curve.look + (" hollow" if curve.dashed else ""))
            for curve in curves
        ]
    )
    chart = curve_chart("Tokens per second against temperature", told, curves, Axis("temperature"), Axis("tokens/s"))
    said = "Tokens per second, prefill included, against the sampling temperature; 0 is greedy."
    said += " Dashed: peers." if any(curve.dashed for curve in curves) else ""
    return section("temperatures", "Temperature", figure(said, keys, chart, wide=True))
