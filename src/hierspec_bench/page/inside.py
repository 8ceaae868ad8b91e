"""Inside a run: where the time goes, how close to the memory limit, and whose drafts were accepted."""

from __future__ import annotations

from collections.abc import Mapping

from hierspec_bench.page.charts import Bar, Part, bar_chart, bar_scale, column_chart, legend
from hierspec_bench.page.figures import figure, look, percent, section, tag
from hierspec_bench.page.markup import Html, element
from hierspec_bench.record import PLAIN, TIME_PARTS, Entry, Record, Tier
from hierspec_bench.typed_json import mapping, number


def inside_sections(record: Record, colours: Mapping[str, str]) -> list[Html | None]:
    """`colours` gives every source its class, as in the text."""
    charts = [chart for chart in (_time(record), _roofline(record)) if chart is not None]
    time = section("time", "Where the time goes", element("div", *charts, class_="cards")) if charts else None
    return [time, _drafts(record, colours)]


def _time(record: Record) -> Html | None:
    bars, seen, from_tiers = [], set(), False
    for entry in record.main.entries:
        tokens, spent = entry.figures.tokens, entry.time or _time_of_tiers(entry)
        if not tokens or not spent:
            continue
        from_tiers |= not entry.time
        seen |= {name for name, seconds in spent.items() if seconds > 0}
        parts = tuple(
            Part(1e3 * spent[name] / tokens, f"time-{index}", name)
            for index, name in enumerate(TIME_PARTS)
            if name in spent
        )
        bars.append(Bar(entry.name, parts, f"{1e3 * sum(spent.values()) / tokens:.1f}", tag(entry)))
    if not bars:
        return None
    keys = [(name, f"time-{index}") for index, name in enumerate(TIME_PARTS) if name in seen]
    caption = "Milliseconds for one token of the answer, prefill included: shorter is faster."
    if from_tiers:
        caption += " This record has only its tiers' counters: picking is within drafting and verifying."
    chart = bar_chart(bars, bar_scale(bars), "ms a token")
    return figure(caption, legend(keys), chart, title="One token, taken apart", wide=True)


def _time_of_tiers(entry: Entry) -> dict[str, float]:
    """For records without the parts of the time: from the tiers' counters, if they fit into the total."""
    whole = entry.figures.seconds
    if not entry.tiers or whole is None:
        return {}
    seconds = [tier.seconds for tier in entry.tiers]
    stores = sum(tier.store_seconds for tier in entry.tiers)
    rest = whole - sum(seconds) - stores
    if rest < -0.02 * whole:
        return {}
    return {"drafting": sum(seconds[1:]), "verifying": seconds[0], "stores": stores, "other": max(0.0, rest)}


def _roofline(record: Record) -> Html | None:
    bandwidth = mapping(record.document.get("bandwidth"))
    limit = number(bandwidth.get("gigabytes_per_second"))
    bars = []
    for entry in record.main.entries:
        value = entry.figures.gigabytes_per_second
        if value is not None:
            part = Part(value, look(entry, record.best))
            share = percent(value / limit) if limit else ""
            bars.append(Bar(entry.name, (part,), f"{value:.1f}", tag(entry), beside=share))
    if not bars:
        return None
    caption = "Bytes of weights that decoding read in a second."
    if limit:
        caption += (
            f" The line is what this machine's memory was measured to give, {limit:.1f} GB/s; beside, the share of it."
        )
    weights = number(bandwidth.get("weights_bytes"))
    caption += f" One pass reads {weights / 1e6:,.0f} MB." if weights else ""
    caption += f" Measured: {bandwidth['method']}." if bandwidth.get("method") else ""
    chart = bar_chart(bars, bar_scale(bars, limit or 0.0), "GB/s", limit)
    return figure(caption, chart, title="How near the memory's limit", wide=True)


def _drafts(record: Record, colours: Mapping[str, str]) -> Html | None:
    verifiers = []
    for entry in record.main.entries:
        tiers = [tier for tier in entry.tiers if tier.proposed]
        verifiers += [(entry, tier, len(tiers) > 1) for tier in tiers if entry.kind != PLAIN]
    if not any(size for _, tier, _ in verifiers for size in _a_pass(tier, tier.proposed_by_depth)):
        return None
    # Only one path is accepted, so at most one token per depth: a wide tree must not flatten the columns.
    accepted = [size for _, tier, _ in verifiers for size in _a_pass(tier, tier.accepted_by_depth)]
    highest = max([1.0, *accepted])
    cards = [_card(entry, tier, several, highest, colours) for entry, tier, several in verifiers]
    lead = element(
        "p",
        "Draft tokens that a tier verified, by depth in the draft: outlined, how many a pass was given at each depth, "
        "with the number above where it is more than the chart is high; filled, how many it accepted. Below, the same "
        "by source. All charts have one scale.",
        class_="lead",
    )
    return section("guesses", "Whose drafts were accepted", lead, element("div", *cards, class_="cards small"))


def _card(entry: Entry, tier: Tier, several: bool, highest: float, colours: Mapping[str, str]) -> Html:
    title = f"{entry.name} · verified by {tier.tier}" if several else entry.name
    proposed, accepted = _a_pass(tier, tier.proposed_by_depth), _a_pass(tier, tier.accepted_by_depth)
    described = f"{title}: accepted draft tokens a pass by depth: " + ", ".join(f"{size:.2f}" for size in accepted)
    rows = []
    for source, whole in tier.proposed.items():
        taken = tier.accepted.get(source, 0.0)
        mark = element("span", "ab", class_=f"run {colours.get(source, 'own')}", aria_hidden="true")
        name = element("span", source, class_="name")
        value = element("span", f"{taken:,.0f} of {whole:,.0f}", class_="value")
        rows.append(element("li", mark, name, value, element("b", percent(taken / whole) if whole else "")))
    calls = element("p", f"{tier.calls:,} {'pass' if tier.calls == 1 else 'passes'}", class_="muted")
    chart = column_chart(described, proposed, accepted, highest, "accepted")
    return figure("", calls, chart, element("ul", *rows, class_="sources"), title=title)


def _a_pass(tier: Tier, sizes: tuple[float, ...]) -> list[float]:
    return [size / tier.calls for size in sizes] if tier.calls else []
