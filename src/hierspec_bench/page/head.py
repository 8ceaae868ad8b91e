"""The result in one sentence and four figures, what it was measured on, and caveats."""

from __future__ import annotations

from collections.abc import Mapping

from hierspec_bench.page.figures import exact, rate, times
from hierspec_bench.page.markup import Child, Html, element
from hierspec_bench.page.peers import described
from hierspec_bench.record import PEER, Record
from hierspec_bench.typed_json import mapping

# Shown elsewhere on the page, so left out of the collapsed list of all facts.
_ELSEWHERE = {
    *("plans", "peers", "texts", "other_temperatures", "absent_peers", "command", "bandwidth", "kind", "version"),
    *("complete", "prompts_done", "prompts_total", "exits", "agreement"),
}


def head(record: Record) -> Html:
    command = record.document.get("command")
    return element(
        "header",
        element("p", "hierspec bench", class_="eyebrow"),
        element("h1", sentence(record)),
        *_marks(record),
        _tiles(record),
        element("pre", element("code", str(command)), class_="command", tabindex=0, aria_label="Command")
        if command
        else None,
        _conditions(record),
        _set_up(record),
    )


def sentence(record: Record) -> str:
    """The result, even if it is not flattering."""
    best, peer = record.best, record.best_peer
    if best is None:
        return "Plain decoding alone: there is no plan to compare."
    figures = best.figures
    speedup = figures.speedup or 0.0
    if speedup >= 1:
        text = f"The fastest plan, {best.name}, writes {times(speedup)} as many tokens a second as plain decoding"
    else:
        text = (
            f"No plan is faster than plain decoding: the best, {best.name}, writes {times(speedup)} its tokens a second"
        )
    if peer is not None and (ratio := best.over(peer)) is not None:
        text += f" and {times(ratio)} as many as the fastest other engine, {peer.name}"
    if figures.identical is not None and figures.prompts is not None:
        text += f"; {figures.identical:,} of {figures.prompts:,} outputs are identical to plain's"
        text += f", {figures.ties} more differ at a tie" if figures.ties else ""
    return text + "."


def _marks(record: Record) -> list[Html]:
    marks, document = [], record.document
    if not record.complete:
        done = document.get("prompts_done")
        # A prompt counts once per repeat, so prefer the run's total to the size of the set.
        total = document.get("prompts_total", record.prompt_set[1])
        many = f" {exact(done)} of {exact(total)} prompts are in it." if done is not None and total is not None else ""
        marks.append(_mark("Partial", f"The run was not finished.{many} Figures may still move."))
    if record.synthetic:
        text = "Some tier only simulates how often it agrees: these are speeds to expect, not measured ones."
        marks.append(_mark("Synthetic", text))
    weights = document.get("weights")
    if weights in ("int8", "int4"):
        others = " Other engines run the weights that are named with each." if record.main.named(PEER) else ""
        text = (
            f"Our plans run with weights rounded to {weights}, plain decoding too: identical means the text that "
            f"the model writes with these weights.{others}"
        )
        marks.append(_mark("Rounded weights", text))
    return marks


def _mark(title: str, text: str) -> Html:
    return element("p", element("strong", title), " ", text, class_="warning", role="note")


def _tiles(record: Record) -> Html | None:
    best, peer = record.best, record.best_peer
    if best is None:
        return None
    figures = best.figures
    tiles = [(times(figures.speedup), "plain decoding", best.name + _interval(figures.speedup_interval))]
    if peer is not None and (ratio := best.over(peer)) is not None:
        tiles.append((times(ratio), "fastest other engine", peer.name + _interval(best.interval_over(peer))))
    tiles.append((rate(figures.tokens_per_second), "tokens/s", "prefill included"))
    if figures.identical is not None and figures.prompts is not None:
        tiles.append((f"{figures.identical:,}/{figures.prompts:,}", "identical", "outputs, token by token"))
    boxes = [
        element("div", element("dt", what), element("dd", figure, class_="big"), element("dd", more, class_="muted"))
        for figure, what, more in tiles
    ]
    return element("dl", *boxes, class_="tiles")


def _interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f", 95% {interval[0]:.2f}–{interval[1]:.2f}"


def _conditions(record: Record) -> Html:
    """What a reader needs to judge the figures, in one line."""
    document, machine = record.document, mapping(record.document.get("machine"))
    prompts = document.get("prompts")
    if isinstance(prompts, Mapping):
        prompts = f"{exact(prompts.get('count'))} of {exact(prompts.get('name'))}"
    facts = [
        ("model", document.get("model")),
        ("dtype", document.get("dtype")),
        ("weights", document.get("weights")),
        ("machine", machine.get("device") or machine.get("processor")),
        ("cores", machine.get("cores")),
        ("threads", document.get("threads")),
        ("affinity", document.get("affinity")),
        ("temperature", document.get("temperature")),
        ("max tokens", document.get("max_tokens")),
        ("prompts", prompts),
        ("repeats", document.get("repeats")),
    ]
    boxes = [
        element("div", element("dt", name), element("dd", described(value)))
        for name, value in facts
        if value is not None and value != []
    ]
    return element("dl", *boxes, class_="conditions")


def _set_up(record: Record) -> Html:
    rows = _rows({key: value for key, value in record.document.items() if key not in _ELSEWHERE})
    summary = element("summary", "Versions, hashes and everything else in the record")
    return element("details", summary, element("dl", *rows, class_="facts"))


def _rows(facts: Mapping[str, object]) -> list[Child]:
    rows: list[Child] = []
    for name, value in facts.items():
        if value is None:
            continue
        inner = (
            element("dl", *_rows(value), class_="facts") if isinstance(value, Mapping) and value else described(value)
        )
        rows.append([element("dt", str(name).replace("_", " ")), element("dd", inner)])
    return rows
