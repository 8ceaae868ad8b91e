"""What is told about answers beside their text: tokens used, time taken, log-probabilities. In OpenAI's words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hierspec.core.logprobs import TokenLogprobs
from hierspec.generation import Generation
from hierspec.text.tokenizer import Tokenizer

_LEAST = -9999.0  # for minus infinity, which JSON has no word for; OpenAI's API does the same


def usage(prompts: Sequence[int], written: int, cached: int = 0) -> dict[str, Any]:
    """Of one call: the tokens of its prompts, each counted once, and of all answers."""
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": written,
        "total_tokens": sum(prompts) + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(answer: Generation) -> dict[str, Any]:
    """As llama.cpp's clients read them: prefill, then the rest; and drafts verified by the model itself."""
    target = answer.stats.tiers[0]
    later, tokens = answer.seconds - answer.first_seconds, len(answer.tokens)
    return {
        "prompt_n": answer.prompt_tokens,
        "prompt_ms": _milliseconds(answer.first_seconds),
        "prompt_per_second": _rate(answer.prompt_tokens, answer.first_seconds),
        "predicted_n": tokens,
        "predicted_ms": _milliseconds(later),
        "predicted_per_second": _rate(tokens - answer.first_tokens, later),
        "draft_n": sum(target.proposed.values()),
        "draft_n_accepted": sum(target.accepted.values()),
    }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """As chat completions have them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token, special=True)
        return {"token": piece.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(piece)}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.top]} for each in logprobs
    ]
    return {"content": content, "refusal": None}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text completions name it: one that is a part of a character by its bytes, so that no two are alike."""
    piece = tokenizer.piece(token, special=True)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
