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

_LEAST = -9999.0  # stands for minus infinity, which JSON lacks, as in OpenAI's API


def usage(prompts: Sequence[int], written: int, finished: Sequence[Generation] = ()) -> dict[str, Any]:
    """Usage of one call: prompt tokens, each prompt counted once, and generated tokens of all answers."""
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": written,
        "total_tokens": sum(prompts) + written,
        "prompt_tokens_details": {"cached_tokens": min(sum(prompts), sum(map(cached_tokens, finished)))},
    }


def cached_tokens(answer: Generation) -> int:
    """Prompt tokens that were already in the KV cache, from an earlier text or another answer of this call."""
    return min(answer.prompt_tokens, answer.stats.tiers[0].known or 0)


@dataclass
class Timings:
    """Timings as llama.cpp's clients read them: prefill, then decoding, and drafts that the target verified."""

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
    """Log-probabilities in the format of chat completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token, special=True)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.top]} for each in logprobs
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """Log-probabilities in the format of text completions: four lists, one of them with the start of each token's
    text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._length = 0  # of the text so far

    def first(self, token: int) -> dict[str, Any]:
        """The entry of a prompt's first token, which nothing predicts."""
        return self._lists([token], [None], [None])

    def of(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tops = [{self._text(token): _finite(logprob) for token, logprob in each.top} for each in logprobs]
        for each, top in zip(logprobs, tops, strict=True):
            top.setdefault(self._text(each.token), _finite(each.logprob))  # the token itself is always included
        return self._lists([each.token for each in logprobs], [_finite(each.logprob) for each in logprobs], tops)

    def _lists(self, tokens: list[int], logprobs: Sequence[float | None], tops: Sequence[Any]) -> dict[str, Any]:
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": list(tops),
            "text_offset": [self._offset(token) for token in tokens],
        }

    def _text(self, token: int) -> str:
        """The text of a token; its bytes if it is part of a character, its id if it has no text: all are distinct."""
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
    """Concatenates the lists of several parts."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
