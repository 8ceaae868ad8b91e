"""Times one forward pass: by width and context, by part, and against the memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hierspec.core.sampling import Sampling
from hierspec.language_model import LanguageModel
from hierspec.progress import Progress, silent
from hierspec.scorers.timing import PassTimer
from hierspec_bench.bandwidth import memory_bandwidth
from hierspec_bench.peers import TransformersPeer

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 1024, 4096)
_PREFILL = 1000
_REPEATS = 5


def measure_passes(
    model: LanguageModel,
    peer: TransformersPeer | None = None,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Medians over interleaved repeats: every width, and transformers if `peer` is given, once per round."""
    contexts = [context for context in contexts if context + max(widths) < model.config.context]
    rng = np.random.default_rng(0)
    text = rng.integers(0, model.config.vocabulary, max([*contexts, _PREFILL]) + max(widths)).astype(np.int32)
    bandwidth, weights = memory_bandwidth(), model.decoder.weight_bytes
    result: dict[str, Any] = {
        "memory_gigabytes_per_second": round(bandwidth / 1e9, 1),
        "weight_megabytes": round(weights / 1e6, 1),
        "reading_weights_once_ms": round(1e3 * weights / bandwidth, 2),
        "prefill": _prefill(model, peer, text),
        "passes": [],
    }
    rounds, done = len(contexts) * _REPEATS, 0
    for context in contexts:
        timer = PassTimer(model.scorer(model.config.layers), text[:context])
        times: dict[int, list[list[float]]] = {width: [] for width in widths}
        theirs: list[float] = []
        peer_step = None if peer is None else peer.stepper(text[:context].tolist())
        for _ in range(_REPEATS):
            for width in widths:
                times[width].append(timer.run(text[context : context + width]))
            if peer_step is not None:
                theirs.append(_seconds(lambda: peer_step(int(text[context]))))  # noqa: B023
            done += 1
            progress("Measuring passes", done, rounds)
        timer.close()
        narrowest = float(np.median([sum(parts) for parts in times[widths[0]]]))
        for width in widths:
            layers, head, picks = np.median(np.array(times[width]), axis=0)
            total = float(np.median([sum(parts) for parts in times[width]]))
            row = {
                "context": context,
                "tokens": width,
                "ms": round(1e3 * total, 2),
                "ratio": round(total / narrowest, 2),
            }
            row["gigabytes_per_second"] = round(weights / total / 1e9, 1)
            row |= {"layers_ms": round(1e3 * layers, 2), "head_ms": round(1e3 * head, 2)}
            result["passes"].append(row | {"pick_ms": round(1e3 * picks, 3)})
        if theirs:
            result["passes"].append(
                {"context": context, "tokens": 1, "ms": round(1e3 * float(np.median(theirs)), 2), "by": "transformers"}
            )
    return result


def _prefill(model: LanguageModel, peer: TransformersPeer | None, text: np.ndarray) -> list[dict[str, Any]]:
    """Tokens per second of a prefill."""
    count = min(_PREFILL, model.config.context - 1)
    prompt = text[:count].tolist()

    def ours() -> None:
        model.forget()
        model.generate(prompt, plan="plain", max_tokens=1)

    runs: dict[str, Callable[[], Any]] = {"hierspec": ours}
    if peer is not None:
        runs["transformers"] = lambda: peer.generate(prompt, Sampling(max_tokens=1))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            times[name].append(_seconds(run))
    return [
        {"by": name, "tokens": count, "seconds": round(min(t), 3), "tokens_per_second": round(count / min(t), 1)}
        for name, t in times.items()
    ]


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
