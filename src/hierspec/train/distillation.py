"""The divergence of draft models with heads of their own from a target, over whole vocabularies.

Logits of a whole vocabulary are large, so positions are processed in slices. For each slice the target's distribution
is computed once for all draft models, and the gradients of each model's features and head together with its loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SLICE, _SLICE_CPU = 1 << 28, 1 << 24  # numbers of logits in a slice


@dataclass(frozen=True)
class Distance:
    """How far a draft model is from its target, on average over positions."""

    divergence: Tensor  # KL(target || draft), with gradients
    overlap: Tensor  # 1 - TV: how often its tokens would be accepted at temperature 1
    agreement: Tensor  # how often its best token is the target's


def distances(feature: Tensor, head: Tensor, drafts: Sequence[tuple[Tensor, Tensor]]) -> list[Distance]:
    """Distances of each draft (its features [positions, hidden] and its head) from the target's features and head."""
    flat = [tensor for draft in drafts for tensor in draft]
    values = _Distances.apply(feature, head, *flat)
    return [Distance(*values[number : number + 3]) for number in range(0, len(values), 3)]


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feature: Tensor, head: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        device, dtype = head.device, head.dtype
        sums = torch.zeros(len(pairs), 3, device=device)
        by_feature = [torch.empty_like(features, dtype=dtype) for features, _ in pairs]
        by_head = [torch.zeros_like(own, dtype=torch.float32) for _, own in pairs]
        count = len(feature)
        size = max(1, (_SLICE if device.type == "cuda" else _SLICE_CPU) // len(head))
        for start in range(0, count, size):
            here = slice(start, start + size)
            logits = functional.linear(feature[here].to(dtype), head)
            best = logits.argmax(-1)
            p_log = logits.log_softmax(-1, dtype=torch.float32)
            p = p_log.exp()
            for number, (features, own) in enumerate(pairs):
                rows, weights = features[here].to(dtype), own.to(dtype)
                logits = functional.linear(rows, weights)
                q_log = logits.log_softmax(-1, dtype=torch.float32)
                sums[number, 0] += (p * (p_log - q_log)).sum()
                sums[number, 2] += (logits.argmax(-1) == best).sum()
                q = q_log.exp_()
                sums[number, 1] += torch.minimum(p, q).sum()
                by_logits = q.sub_(p).div_(count).to(dtype)
                by_feature[number][here] = by_logits @ weights
                by_head[number] += (by_logits.T @ rows).float()
        ctx.save_for_backward(*by_feature, *by_head)
        ctx.dtypes = [(features.dtype, own.dtype) for features, own in pairs]
        values = tuple((sums / count).flatten())
        ctx.mark_non_differentiable(*(value for place, value in enumerate(values) if place % 3))
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        by_feature, by_head = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        flat: list[Tensor] = []
        for number, (of_features, of_head) in enumerate(ctx.dtypes):
            scale = gradients[3 * number]
            flat += [by_feature[number].to(of_features) * scale, by_head[number].to(of_head) * scale]
        return (None, None, *flat)
