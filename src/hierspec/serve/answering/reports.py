"""Usage, timings and log-probabilities of answers, in OpenAI's field names."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hierspec.core.logprobs import TokenLogprobs
from hierspec.generation import Generation, TextStep
from hierspec.text.tokenizer import Tokenizer

_LEAST = -9999.0  # for minus infinity, which JSON has no word for; OpenAI's API does the same


def usage(prompts: Sequence[int], written: int, finished: Sequence[Generation] = ()) -> dict[str, Any]:
    """Of one call: the tokens of its prompts, each counted once, and those written in all answers."""
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": written,
        "total_tokens": sum(prompts) + written,
        "prompt_tokens_details": {"cached_tokens": min(sum(prompts), sum(map(cached_tokens, finished)))},
    }


def cached_tokens(answer: Generation) -> int:
    """Tokens of the prompt that were computed for an earlier text, or for another answer of this call."""
    return min(answer.prompt_tokens, answer.stats.tiers[0].known or 0)


@dataclass
class Timings:
    """As llama.cpp's clients read them: prefill, then the rest; and drafts that the model itself verified."""

    prompt: int
    first_tokens: int = 0
    first_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def add(self, step: TextStep) -> None:
        if not self.tokens:
            self.first_tokens, self.first_seconds = len(step.tokens), step.seconds
        self.tokens += len(step.tokens)
        self.seconds += step.seconds
        self.drafted += len(step.draft)
        self.accepted += len(step.accepted)

    def to_json(self) -> dict[str, Any]:
        later, tokens = self.seconds - self.first_seconds, self.tokens - self.first_tokens
        return {
            "prompt_n": self.prompt,
            "prompt_ms": _milliseconds(self.first_seconds),
            "prompt_per_token_ms": _milliseconds(self.first_seconds / self.prompt),
            "prompt_per_second": _rate(self.prompt, self.first_seconds),
            "predicted_n": self.tokens,
            "predicted_ms": _milliseconds(later),
            "predicted_per_token_ms": _milliseconds(later / tokens if tokens else 0.0),
            "predicted_per_second": _rate(tokens, later),
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
        }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """As chat completions have them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token, special=True)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.top]} for each in logprobs
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """As text completions have them: four lists, and where each token's text begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._length = 0  # of the text so far

    def first(self, token: int) -> dict[str, Any]:
        """Of a prompt's first token, which nothing predicts."""
        return self._lists([token], [None], [None])

    def of(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tops = [{self._text(token): _finite(logprob) for token, logprob in each.top} for each in logprobs]
        for each, top in zip(logprobs, tops, strict=True):
            top.setdefault(self._text(each.token), _finite(each.logprob))  # the token itself is always there
        return self._lists([each.token for each in logprobs], [_finite(each.logprob) for each in logprobs], tops)

    def _lists(self, tokens: list[int], logprobs: Sequence[float | None], tops: Sequence[Any]) -> dict[str, Any]:
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": list(tops),
            "text_offset": [self._offset(token) for token in tokens],
        }

    def _text(self, token: int) -> str:
        """A part of a character is named by its bytes and what has no text by its id, so that no two are alike."""
        piece = self._tokenizer.piece(token, special=True)
        try:
            return piece.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _offset(self, token: int) -> int:
        offset = self._length
        self._length += len(self._decoder.decode(self._tokenizer.piece(token)))
        return offset


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Such lists one after the other."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
