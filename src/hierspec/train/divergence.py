"""The divergence of drafts from a reference distribution over a head's rows, with gradients.

KL(p || q) = sum p log p - sum p log q, and sum p log q is the product of the draft's features with the expected row of
the head under p, less the log-sum-exp of the draft's logits. The expected row is computed once for all drafts, so each
draft needs its logits only once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class ReferenceDistribution:
    """The distributions that drafts are compared with: from features [positions, hidden] and a head's rows."""

    def __init__(self, features: Tensor, head: Tensor) -> None:
        with torch.no_grad():
            self._head = head
            logits = functional.linear(features.to(head.dtype), head)
            self.best = logits.argmax(-1)
            log_probabilities = logits.log_softmax(-1, dtype=torch.float32)
            probabilities = log_probabilities.exp()
            self._negative_entropy = (probabilities * log_probabilities).sum(-1)
            self._expected_row = (probabilities.to(head.dtype) @ head).float()

    def divergence(self, draft: Tensor) -> Tensor:
        """KL divergence of the distribution that these features [positions, hidden] give; one number per position."""
        rounded = draft.to(self._head.dtype)
        cross_term = (rounded.float() * self._expected_row).sum(-1)
        return self._negative_entropy - cross_term + _LogSumExp.apply(rounded, self._head)

    def agreement(self, draft: Tensor, most: int = 4096) -> Tensor:
        """How often the draft's best row is the reference's, on the first positions."""
        with torch.no_grad():
            best = functional.linear(draft[:most].to(self._head.dtype), self._head).argmax(-1)
            return (best == self.best[:most]).float().mean()


class _LogSumExp(torch.autograd.Function):
    """Log-sum-exp of a draft's logits; saves only their log-softmax for the backward pass."""

    @staticmethod
    def forward(ctx: Any, draft: Tensor, head: Tensor) -> Tensor:
        logits = functional.linear(draft, head)
        log_probabilities = logits.log_softmax(-1, dtype=torch.float32)
        ctx.save_for_backward(log_probabilities, head)
        return logits[:, 0].float() - log_probabilities[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_probabilities, head = ctx.saved_tensors
        return log_probabilities.exp().mul_(gradients[0][:, None]).to(head.dtype) @ head, None
