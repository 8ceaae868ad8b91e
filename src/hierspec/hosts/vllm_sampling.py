"""Repairs sampling with speculation in vLLM for CPUs.

Its function that repeats a request's settings for each drafted token writes integers into a copy, so temperatures and
top-p are whatever the memory held. And a step without drafts fails if top-k is set. Both are replaced by torch code
that computes what the GPU's kernel does; vLLM looks the functions up by these names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SPREAD, _CONSTRAIN = "expand_batch_to_tokens", "apply_sampling_constraints"


def cure_sampling(sampler: Any) -> None:
    """Replace the two functions in vLLM's module `rejection_sampler`; do nothing if a version has other ones."""
    constrain = getattr(sampler, _CONSTRAIN, None)
    if constrain is None or not hasattr(sampler, _SPREAD):
        return

    def constrained(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        if not logits.shape[0]:
            return logits
        result: Tensor = constrain(logits, cu_num_draft_tokens, sampling_metadata)
        return result

    setattr(sampler, _SPREAD, spread)
    setattr(sampler, _CONSTRAIN, constrained)


def spread(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Each request's value, once for each of its tokens; `cu_num_tokens` are the cumulative counts."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts.long(), output_size=num_tokens)
