"""How long stores take to propose and to learn, by how much they hold. No model is loaded.

It made docs/results/stores-times.json and docs/pictures/stores-times.svg; --draw makes the chart of a record again.

examples:
  python experiments/store_times.py --output stores.json
  python experiments/store_times.py --largest 1000000          a quick look
  python experiments/store_times.py --draw docs/results/stores-times.json --output docs/pictures/stores-times.svg
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Store
from hierspec.machine import machine
from hierspec.paths import whole_file
from hierspec.plot import PAIRED, Axis, Chart, Line
from hierspec.progress import Progress, silent
from hierspec.stores.context import ContextStore

CONTEXTS = (1_000, 4_000, 16_000, 32_000)
HISTORIES = (100_000, 1_000_000, 10_000_000)
CORPORA = (1_000_000, 10_000_000, 100_000_000)

_VOCABULARY = 49_152
_DOCUMENT = 512  # tokens that a history learns at once, and of a text of the corpus
_SEEN = 256  # tokens of context that a shared store gets
_BYTES = 128  # bytes per token that a history may use: enough to hold them all
_WARM = 100  # warm-up calls


def measure_stores(
    progress: Progress = silent,
    contexts: Sequence[int] = CONTEXTS,
    histories: Sequence[int] = HISTORIES,
    corpora: Sequence[int] = CORPORA,
    budget: int = 16,
    calls: int = 2_000,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Microseconds per call, median and 99th percentile, on synthetic text; corpora are built in `folder`.

    `learn` is per token: one at a time for the context, whole documents for the history. The context only records a
    token; indexing it is part of the next proposal.
    """
    text = MadeUpText()
    done, total = 0, sum((*contexts, *histories, *corpora))
    result: dict[str, Any] = {"budget": budget, "calls": calls}
    measured: tuple[tuple[str, Sequence[int], Callable[[int], dict[str, Any]]], ...] = (
        ("context", contexts, lambda size: _context(text, size, budget, calls)),
        ("history", histories, lambda size: _history(text, size, budget, calls)),
        ("corpus", corpora, lambda size: _corpus(text, size, budget, calls, folder)),
    )
    for name, sizes, measure in measured:
        rows = []
        for size in sizes:
            progress("Measuring stores", done, total)
            rows.append({"tokens": size} | measure(size))
            done += size
        result[name] = rows
    progress("Measuring stores", total, total)
    return result


def no_larger(sizes: Sequence[int], largest: int | None) -> tuple[int, ...]:
    """The sizes up to `largest`, or only `largest` if all are beyond it."""
    return tuple(sizes) if largest is None else tuple(size for size in sizes if size <= largest) or (largest,)


def chart(measured: dict[str, Any]) -> Chart:
    """Cost against size, from the results of `measure_stores`."""
    lines = []
    for colour, name in enumerate(("context", "history", "corpus")):
        median, p99 = (
            [(row["tokens"], row["propose_us"][figure]) for row in measured[name]] for figure in ("median", "p99")
        )
        lines.append(Line(f"{name}, median", median, colour=colour))
        lines.append(Line(f"{name}, 99%", p99, dashed=True, colour=colour + PAIRED))
    learnt = [(row["tokens"], row["learn_us"]["median"]) for row in measured["history"]]
    lines.append(Line("history, learning", learnt, colour=3))
    return Chart(
        "Stores: cost against size",
        Axis("tokens held", logarithmic=True),
        Axis("microseconds", logarithmic=True),
        lines,
        f"one proposal of up to {measured['budget']} nodes, median and 99th percentile; learning: a token, median",
    )


class MadeUpText:
    """Synthetic text like real text for a store: few tokens are frequent, many rare, and phrases recur."""

    def __init__(self, phrases: int = 200_000, vocabulary: int = _VOCABULARY) -> None:
        rng = np.random.default_rng(0)
        self._token_distribution = _zipf(vocabulary)
        self._phrase_distribution = _zipf(phrases)
        lengths = rng.geometric(0.15, phrases) + 1
        self._stops = np.cumsum(lengths)
        self._starts = self._stops - lengths
        self._phrases = _drawn(rng, self._token_distribution, int(self._stops[-1]))

    def tokens(self, count: int, seed: int) -> np.ndarray:
        """Text by seed, int32; another seed gives other text with the same phrases."""
        rng = np.random.default_rng(seed)
        parts, size = [], 0
        while size < count:
            chosen = _drawn(rng, self._phrase_distribution, min(count, 1 << 18) // 4 + 1)
            lengths = self._stops[chosen] - self._starts[chosen]
            firsts = np.cumsum(lengths) - lengths
            part = self._phrases[np.arange(int(lengths.sum())) + np.repeat(self._starts[chosen] - firsts, lengths)]
            new = rng.random(len(part)) < 0.1  # words that the phrase does not fix
            part[new] = _drawn(rng, self._token_distribution, int(new.sum()))
            parts.append(part)
            size += len(part)
        return np.concatenate(parts)[:count]


def _zipf(count: int) -> np.ndarray:
    """Cumulative probabilities of ranks."""
    probabilities = 1.0 / (np.arange(count) + 2.7)
    return np.cumsum(probabilities / probabilities.sum())


def _drawn(rng: np.random.Generator, cumulative: np.ndarray, count: int) -> np.ndarray:
    return np.minimum(np.searchsorted(cumulative, rng.random(count)), len(cumulative) - 1).astype(np.int32)


def _context(text: MadeUpText, size: int, budget: int, calls: int) -> dict[str, Any]:
    """Token by token, like a request: propose, then learn what was written."""
    tokens = text.tokens(size + _WARM + calls, 1)
    opened = ContextStore()
    began = time.perf_counter()
    store = opened.begin(tokens[:size])
    begin = time.perf_counter() - began
    proposals, learns, nodes = [], [], 0
    for end in range(size, len(tokens)):
        context, new = tokens[:end], [int(tokens[end])]
        start = time.perf_counter()
        proposal = store.propose(context, budget)
        middle = time.perf_counter()
        store.learn(new)
        learns.append(time.perf_counter() - middle)
        proposals.append(middle - start)
        nodes += len(proposal)
    return {
        "propose_us": _summary(proposals),
        "learn_us": _summary(learns),
        "begin_ms": round(1e3 * begin, 2),
        "nodes": round(nodes / len(proposals), 1),
    }


def _history(text: MadeUpText, size: int, budget: int, calls: int) -> dict[str, Any]:
    """In memory, without a file."""
    from hierspec.stores.history import HistoryStore

    store = HistoryStore(limit=max(_BYTES * size, 1 << 24))
    tokens = text.tokens(size, 2)
    learns = []
    for start in range(0, size, _DOCUMENT):
        document = tokens[start : start + _DOCUMENT]
        began = time.perf_counter()
        store.add(document)
        learns.append((time.perf_counter() - began) / len(document))
    view = store.begin(tokens[:8])
    return _proposals(view, text, budget, calls) | {"learn_us": _summary(learns), "bytes": store.info()["bytes"]}


def _corpus(text: MadeUpText, size: int, budget: int, calls: int, folder: Path | None) -> dict[str, Any]:
    """A corpus of texts that are numbers; encoding one gives the synthetic text of that seed."""
    from hierspec.stores.corpus import CorpusStore
    from hierspec.stores.corpus_build import build_corpus

    def encode(numbers: list[str]) -> list[list[int]]:
        return [text.tokens(per_text, 1_000 + int(number)).tolist() for number in numbers]

    per_text = min(size, 64 * _DOCUMENT)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        listed = Path(made) / "numbers.jsonl"
        lines = (json.dumps({"text": str(number)}) + "\n" for number in range(-(-size // per_text)))
        listed.write_text("".join(lines), encoding="utf-8")
        began = time.perf_counter()
        build_corpus(Path(made) / "corpus", [listed], encode, _VOCABULARY, "made up")
        build = time.perf_counter() - began
        store = CorpusStore(Path(made) / "corpus", "made up")
        times = _proposals(store, text, budget, calls)
        return times | {"build_seconds": round(build, 1), "bytes": store.info()["bytes"]}


def _proposals(store: Store, text: MadeUpText, budget: int, calls: int) -> dict[str, Any]:
    """Times proposals of a store that has learnt, for text that it does not hold."""
    tokens = text.tokens(_SEEN + _WARM + calls, 3)
    times, nodes = [], 0
    for end in range(_SEEN, len(tokens)):
        context = tokens[end - _SEEN : end]
        began = time.perf_counter()
        proposal = store.propose(context, budget)
        times.append(time.perf_counter() - began)
        nodes += len(proposal)
    return {"propose_us": _summary(times), "nodes": round(nodes / len(times), 1)}


def _summary(seconds: list[float]) -> dict[str, float]:
    counted = 1e6 * np.array(seconds[min(_WARM, len(seconds) // 2) :])
    return {"median": round(float(np.median(counted)), 2), "p99": round(float(np.percentile(counted, 99)), 2)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--largest", type=int, metavar="N", help="no store larger than N tokens")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON document, with a chart beside it")
    parser.add_argument("--draw", type=Path, metavar="RECORD", help="only write the chart of a record to --output")
    parser.add_argument("--json", action="store_true", help="only the JSON document, no table")


def run(arguments: argparse.Namespace) -> int:
    if arguments.draw is not None:
        _draw(json.loads(arguments.draw.read_text(encoding="utf-8")), arguments.output or Path("stores.svg"))
        return 0
    if arguments.largest is not None and arguments.largest < 100:
        raise HierspecError(f"--largest must be at least 100 tokens, not {arguments.largest}.")
    contexts, histories, corpora = (no_larger(sizes, arguments.largest) for sizes in (CONTEXTS, HISTORIES, CORPORA))
    with progress_bars() as progress:
        measured = measure_stores(progress, contexts, histories, corpora)
    if not arguments.json:
        for name in ("context", "history", "corpus"):
            for row in measured[name]:
                learning = f", learning a token {row['learn_us']['median']}" if "learn_us" in row else ""
                times = row["propose_us"]
                note(f"{name} of {row['tokens']:,}: a proposal {times['median']} us (99%: {times['p99']}){learning}")
    if arguments.output is not None:
        _draw(measured, arguments.output.with_suffix(".svg"))
    hand_out({"machine": machine(), "command": command_line(), **measured}, arguments.output)
    return 0


def _draw(measured: dict[str, Any], path: Path) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(chart(measured).svg(), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
