"""The result in one sentence and four figures, what it was measured on, and marks where it must be read with care."""

from __future__ import annotations

from collections.abc import Mapping

from hierspec_bench.page.figures import exact, rate, times
from hierspec_bench.page.markup import Child, Html, element
from hierspec_bench.page.peers import described
from hierspec_bench.page.reading import PEER, Run, mapping

# Shown elsewhere on the page, so left out of the folded list of all facts.
_ELSEWHERE = frozenset({
    "plans", "peers", "texts", "other_temperatures", "absent_peers", "command", "bandwidth", "kind", "version",
    "complete", "prompts_done", "prompts_total", "exits", "agreement",
})  # fmt: skip


def head(run: Run) -> Html:
    command = run.document.get("command")
    return element(
        "header",
        element("p", "hierspec bench", class_="eyebrow"),
        element("h1", sentence(run)),
        *_marks(run),
        _tiles(run),
        element("pre", element("code", str(command)), class_="command", tabindex=0, aria_label="Command")
        if command
        else None,
        _conditions(run),
        _set_up(run),
    )


def sentence(run: Run) -> str:
    """The result. What could be said is said also where it is not flattering."""
    best, peer = run.best, run.best_peer
    if best is None:
        return "Plain decoding alone: there is no plan to compare."
    speedup = best.number("speedup") or 0.0
    if speedup >= 1:
        text = f"The fastest plan, {best.name}, writes {times(speedup)} as many tokens a second as plain decoding"
    else:
        text = (
            f"No plan is faster than plain decoding: the best, {best.name}, writes {times(speedup)} its tokens a second"
        )
    if peer is not None and (ratio := best.over(peer)) is not None:
        text += f" and {times(ratio)} as many as the best peer, {peer.name}"
    same, whole = best.number("identical"), best.number("prompts")
    if same is not None and whole is not None:
        text += f"; {same:,.0f} of {whole:,.0f} outputs are identical to plain's"
        ties = int(best.number("ties") or 0)
        text += f", {ties} more differ at a tie" if ties else ""
    return text + "."


def _marks(run: Run) -> list[Html]:
    marks = []
    if run.partial:
        done = run.document.get("prompts_done")
        # A prompt counts in every repeat, so the run's own whole goes before the size of the set.
        whole = run.document.get("prompts_total", mapping(run.document.get("prompts")).get("count"))
        many = f" {exact(done)} of {exact(whole)} prompts are in it." if done is not None and whole is not None else ""
        marks.append(_mark("Partial", f"The run was not finished.{many} Figures may still move."))
    if run.synthetic:
        marks.append(
            _mark(
                "Synthetic", "Some tier only plays how often it agrees: these are speeds to expect, not measured ones."
            )
        )
    weights = run.document.get("weights")
    if weights in ("int8", "int4"):
        peers = " Peers run the weights that are told with each." if run.main.named(PEER) else ""
        marks.append(
            _mark(
                "Rounded weights",
                f"Our plans run with weights rounded to {weights}, plain decoding too: identical means the text that "
                f"the model writes with these weights.{peers}",
            )
        )
    return marks


def _mark(title: str, text: str) -> Html:
    return element("p", element("strong", title), " ", text, class_="warning", role="note")


def _tiles(run: Run) -> Html | None:
    best, peer = run.best, run.best_peer
    if best is None:
        return None
    tiles = [(times(best.number("speedup")), "plain decoding", best.name)]
    interval = best.interval()
    if interval is not None:
        tiles[0] = (tiles[0][0], "plain decoding", f"{best.name}, 95% {interval[0]:.2f}–{interval[1]:.2f}")
    if peer is not None and (ratio := best.over(peer)) is not None:
        sure = best.interval_over(peer)
        tiles.append((times(ratio), "best peer", peer.name + (f", 95% {sure[0]:.2f}–{sure[1]:.2f}" if sure else "")))
    tiles.append((rate(best.number("tokens_per_second")), "tokens/s", "prefill included"))
    same, whole = best.number("identical"), best.number("prompts")
    if same is not None and whole is not None:
        tiles.append((f"{same:,.0f}/{whole:,.0f}", "identical", "outputs, token by token"))
    made = [
        element("div", element("dt", what), element("dd", figure, class_="big"), element("dd", more, class_="muted"))
        for figure, what, more in tiles
    ]
    return element("dl", *made, class_="tiles")


def _conditions(run: Run) -> Html:
    """What one must know to believe a figure, in one line."""
    document, machine = run.document, mapping(run.document.get("machine"))
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
        ("tokens at most", document.get("max_tokens")),
        ("prompts", prompts),
        ("repeats", document.get("repeats")),
    ]
    made = [
        element("div", element("dt", name), element("dd", described(value)))
        for name, value in facts
        if value is not None and value != []
    ]
    return element("dl", *made, class_="conditions")


def _set_up(run: Run) -> Html:
    rows = _rows({key: value for key, value in run.document.items() if key not in _ELSEWHERE})
    summary = element("summary", "Versions, hashes and all else that the record tells")
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
