"""What formats of weights cost: perplexity on a text, and how often the most likely token changes.

Perplexity is measured in the usual way: the text is cut into windows that overlap by half, and the second half of each
is scored given the tokens before it in the window. It is exp of the mean loss, which is minus the natural logarithm of
the probability that the model gives to the text's token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Scorer
from hierspec.core.logprobs import token_logprobs
from hierspec.core.sampling import NO_TOKEN
from hierspec.core.scoring import score_tokens
from hierspec.language_model import LanguageModel
from hierspec.progress import Progress, silent

TOKENS, WINDOW = 8192, 1024
REFERENCE = "float32"  # what others are compared with, if it was measured
_RUN = 64  # consecutive tokens that the bootstrap resamples as one block, because their losses are correlated
_RESAMPLES = 2000


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of a text's scored tokens, in order."""

    losses: np.ndarray  # minus the natural logarithm of the probability of the text's token
    best: np.ndarray  # the most likely token


@dataclass(frozen=True)
class Window:
    start: int  # the window is start..end of the text, of which first..end is scored
    first: int
    end: int


def windows(length: int, tokens: int, window: int) -> Iterator[Window]:
    """Windows of `window` tokens, each shifted by half, until `tokens` are scored or the text ends."""
    half = window // 2
    end = min(length, window - half + tokens)
    for start in range(0, end - (window - half), half):
        yield Window(start, start + window - half, min(start + window, end))


def score_text(
    scorer: Scorer,
    ids: Sequence[int],
    parts: Sequence[Window],
    opening: Sequence[int] = (),
    progress: Progress = silent,
) -> Scores:
    """Scores of all windows. `opening` is prepended to each window, as to any text."""
    scored = []
    for done, part in enumerate(parts):
        progress("Scoring", done, len(parts))
        text = np.array([*opening, *ids[part.start : part.end]], np.int32)
        scored.append(_score_window(scorer, text, len(opening) + part.first - part.start))
        if NO_TOKEN in scored[-1].best:
            position = part.first + int(np.argmax(scored[-1].best == NO_TOKEN))
            raise HierspecError(
                f"The model's logits are not numbers at token {position} of the text; its weights may be damaged, or "
                "their format too narrow."
            )
    return Scores(
        np.concatenate([scores.losses for scores in scored]), np.concatenate([scores.best for scores in scored])
    )


def _score_window(scorer: Scorer, text: np.ndarray, first: int) -> Scores:
    """Scores of the window's tokens from `first` on."""
    losses: list[float] = []
    best: list[int] = []
    for targets, answer in score_tokens(scorer, text, first):
        assert answer.logits is not None
        assert answer.picks is not None
        best += answer.picks[:, 0].tolist()
        for logits, target in zip(answer.logits, targets.tolist(), strict=True):
            losses.append(-token_logprobs(logits, target, 0).logprob)
    return Scores(np.array(losses), np.array(best))


def figures(scores: Scores, reference: Scores) -> dict[str, Any]:
    """Perplexity, its ratio to the reference's, and the share of positions with the same most likely token.

    Intervals are 95% bootstrap intervals. Both use the same tokens, so the interval of the ratio is far narrower.
    """
    columns = np.column_stack(
        (scores.losses, scores.losses - reference.losses, scores.best == reference.best, np.ones(len(scores.losses)))
    )
    runs = np.add.reduceat(columns, np.arange(0, len(columns), _RUN))
    drawn = np.random.default_rng(0).integers(len(runs), size=(_RESAMPLES, len(runs)))
    loss, difference, same, counts = runs[drawn].sum(axis=1).T
    means = columns.mean(axis=0)
    return {
        "loss": round(float(means[0]), 5),
        "perplexity": round(float(np.exp(means[0])), 4),
        "perplexity_interval": _interval(np.exp(loss / counts)),
        "ratio": round(float(np.exp(means[1])), 4),
        "ratio_interval": _interval(np.exp(difference / counts)),
        "same_best": round(float(means[2]), 4),
        "same_best_interval": _interval(same / counts),
    }


def _interval(values: np.ndarray) -> list[float]:
    return [round(float(edge), 4) for edge in np.quantile(values, [0.025, 0.975])]


@dataclass(frozen=True, eq=False)
class Measured:
    """Scores of a model with weights in one format on a text."""

    weights: str
    about: dict[str, Any]
    text_tokens: int
    window: int
    scores: Scores


def measure(
    model: LanguageModel, text: str, tokens: int = TOKENS, window: int | None = None, progress: Progress = silent
) -> Measured:
    """Scores at most `tokens` tokens of the text, in windows of `window` tokens.

    The default window is 1,024 tokens, or the model's context if that is smaller.
    """
    opening, ids = _ids(model, text)
    if window is None:
        window = min(WINDOW, model.config.context)
    elif window > model.config.context:
        raise HierspecError(
            f"A window of {window:,} tokens is more than the model's context of {model.config.context:,}; give a "
            "smaller one (--window)."
        )
    if len(opening) + len(ids) < window:
        raise HierspecError(
            f"The text has {len(ids):,} tokens, fewer than a window of {window:,}: give a longer text, or a smaller "
            "window (--window)."
        )
    parts = list(windows(len(ids), tokens, window - len(opening)))
    with model.turn():
        scores = score_text(model.scorer(model.config.layers), ids, parts, opening, progress)
    about = {
        "products": model.decoder.products,
        "backend": model.decoder.backend.name,
        "weight_megabytes": round(model.decoder.weight_bytes / 1e6, 1),
    }
    weights = model.dtype if model.weights == "auto" else model.weights
    return Measured(weights, about, len(ids), window, scores)


def compare(measured: Sequence[Measured]) -> dict[str, Any]:
    """The same model with weights in several formats, on the same text: each compared with the reference."""
    reference = next((format for format in measured if format.weights == REFERENCE), measured[0])
    return {
        "text_tokens": reference.text_tokens,
        "window": reference.window,
        "tokens": len(reference.scores.losses),
        "reference": reference.weights,
        "formats": [
            {"weights": format.weights, **format.about, **figures(format.scores, reference.scores)}
            for format in measured
        ],
    }


def _ids(model: LanguageModel, text: str) -> tuple[list[int], list[int]]:
    """What precedes any text, a beginning-of-text token or nothing, and the text's own tokens."""
    opening = model.tokenizer.encode("")[:1]
    return opening if opening == [model.tokenizer.bos_id] else [], model.tokenizer.encode(text, begin=False)
