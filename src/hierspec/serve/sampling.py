"""From the fields of a body to `Sampling`."""

from __future__ import annotations

from typing import Any

from hierspec.core.sampling import Sampling
from hierspec.serve.openai_schemas import SamplingFields
from hierspec.serve.settings import Settings

_AS_THEY_ARE = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")


def sampling_of(body: SamplingFields, settings: Settings, max_tokens: int, logprobs: int | None) -> Sampling:
    """HierspecError where a value is not one that can be sampled with."""
    chosen: dict[str, Any] = {name: getattr(body, name) for name in _AS_THEY_ARE if getattr(body, name) is not None}
    return Sampling(
        max_tokens=max(1, max_tokens),
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()} if body.logit_bias else None,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        **chosen,
    )
