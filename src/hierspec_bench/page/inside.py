"""What happens inside: where the time goes, how near the memory's limit, and whose guesses stood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hierspec_bench.page.charts import Bar, Part, bar_chart, bar_scale, column_chart, legend
from hierspec_bench.page.figures import figure, look, percent, section, tag
from hierspec_bench.page.markup import Html, element
from hierspec_bench.page.reading import PLAIN, TIME_PARTS, Entry, Run, items, mapping, mappings, real


def inside_sections(run: Run, colours: Mapping[str, str]) -> list[Html | None]:
    """`colours` gives every source its class, the same as in the text."""
    charts = [chart for chart in (_time(run), _roofline(run)) if chart is not None]
    time = section("time", "Where the time goes", element("div", *charts, class_="cards")) if charts else None
    return [time, _guesses(run, colours)]


def _time(run: Run) -> Html | None:
    bars, seen, derived = [], set(), False
    for entry in run.main.entries:
        tokens, spent = entry.number("tokens"), entry.time
        if not tokens or not spent:
            continue
        derived |= "time" not in entry.figures
        seen |= {name for name, seconds in spent.items() if seconds > 0}
        parts = tuple(
            Part(1e3 * spent[name] / tokens, f"time-{place}", name)
            for place, name in enumerate(TIME_PARTS)
            if name in spent
        )
        bars.append(Bar(entry.name, parts, f"{1e3 * sum(spent.values()) / tokens:.1f}", tag(entry)))
    if not bars:
        return None
    keys = [(name, f"time-{place}") for place, name in enumerate(TIME_PARTS) if name in seen]
    said = "Milliseconds for one token of the answer, prefill included: shorter is faster."
    if derived:
        said += " This record tells no more than its tiers' counters do: picking is within drafting and verifying."
    return figure(said, legend(keys), bar_chart(bars, bar_scale(bars), "ms a token"),
                  title="One token, taken apart", wide=True)  # fmt: skip


def _roofline(run: Run) -> Html | None:
    bandwidth = mapping(run.document.get("bandwidth"))
    limit = real(bandwidth.get("gigabytes_per_second"))
    bars = []
    for entry in run.main.entries:
        value = entry.number("gigabytes_per_second")
        if value is not None:
            beside = percent(value / limit) if limit else ""
            bars.append(
                Bar(entry.name, (Part(value, look(entry, run.best)),), f"{value:.1f}", tag(entry), beside=beside)
            )
    if not bars:
        return None
    said = "Bytes of weights that decoding read in a second."
    if limit:
        said += (
            f" The line is what this machine's memory was measured to give, {limit:.1f} GB/s; beside, the share of it."
        )
    weights = real(bandwidth.get("weights_bytes"))
    said += f" One pass reads {weights / 1e6:,.0f} MB." if weights else ""
    said += f" Measured: {bandwidth['method']}." if bandwidth.get("method") else ""
    chart = bar_chart(bars, bar_scale(bars, limit or 0.0), "GB/s", limit)
    return figure(said, chart, title="How near the memory's limit", wide=True)


def _guesses(run: Run, colours: Mapping[str, str]) -> Html | None:
    found = []
    for entry in run.main.entries:
        judges = [tier for tier in mappings(entry.figures.get("tiers")) if mapping(tier.get("proposed"))]
        found += [(entry, tier, len(judges) > 1) for tier in judges if entry.kind != PLAIN]
    if not any(size for _, tier, _ in found for size in _a_pass(tier, "proposed_by_depth")):
        return None
    # One path stands, so one guess at most at each depth: a tree's many offers must not flatten what counts.
    highest = max([1.0, *(size for _, tier, _ in found for size in _a_pass(tier, "accepted_by_depth"))])
    cards = [_card(entry, tier, several, highest, colours) for entry, tier, several in found]
    said = element(
        "p",
        "Guesses put to a tier, by how far they stand from what is certain: outlined, how many a pass of that tier was "
        "given at each depth, with the number above where it is more than the chart is high; filled, how many stood. "
        "Below, the same by who guessed. All charts have one scale.",
        class_="lead",
    )
    return section("guesses", "Whose guesses stood", said, element("div", *cards, class_="cards small"))


def _card(entry: Entry, tier: Mapping[str, Any], several: bool, highest: float, colours: Mapping[str, str]) -> Html:
    name = str(tier.get("tier", ""))
    title = f"{entry.name} · judged by {name}" if several else entry.name
    proposed, accepted = mapping(tier.get("proposed")), mapping(tier.get("accepted"))
    given, stood = _a_pass(tier, "proposed_by_depth"), _a_pass(tier, "accepted_by_depth")
    told = f"{title}: accepted guesses a pass by depth: " + ", ".join(f"{size:.2f}" for size in stood)
    rows = []
    for source, offered in proposed.items():
        whole, kept = real(offered) or 0.0, real(accepted.get(source)) or 0.0
        mark = element("span", "ab", class_=f"run {colours.get(source, 'own')}", aria_hidden="true")
        share = percent(kept / whole) if whole else ""
        rows.append(
            element("li", mark, element("span", source, class_="name"),
                    element("span", f"{kept:,.0f} of {whole:,.0f}", class_="value"), element("b", share))
        )  # fmt: skip
    calls = int(real(tier.get("calls")) or 0)
    said = f"{calls:,} {'pass' if calls == 1 else 'passes'}"
    return figure("", element("p", said, class_="muted"), column_chart(told, given, stood, highest, "stood"),
                  element("ul", *rows, class_="sources"), title=title)  # fmt: skip


def _a_pass(tier: Mapping[str, Any], key: str) -> list[float]:
    calls = real(tier.get("calls")) or 0.0
    return [(real(size) or 0.0) / calls for size in items(tier.get(key))] if calls else []
