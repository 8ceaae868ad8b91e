"""How far guesses are from a judge's law over rows of a head, with gradients, in few passes over many logits.

The divergence of q from p is sum p log p - sum p log q, and sum p log q is the guess's product with the expected row of
the head under p, less the logarithm of its sum of exponentials. The expected row is made once for all who guess, so
each guess needs its logits only once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Judged:
    """A judge's law at some positions, from its features [positions, hidden] there and a head's rows."""

    def __init__(self, features: Tensor, head: Tensor) -> None:
        with torch.no_grad():
            self._head = head
            logits = functional.linear(features.to(head.dtype), head)
            self.best = logits.argmax(-1)
            distribution = logits.log_softmax(-1, dtype=torch.float32)
            chances = distribution.exp()
            self._inner = (chances * distribution).sum(-1)
            self._expected = (chances.to(head.dtype) @ head).float()

    def divergence(self, guess: Tensor) -> Tensor:
        """Of the law that a guess [positions, hidden] gives; one number a position."""
        rounded = guess.to(self._head.dtype)
        return self._inner - (rounded.float() * self._expected).sum(-1) + _LogSum.apply(rounded, self._head)

    def agrees(self, guess: Tensor, most: int = 4096) -> Tensor:
        """How often the guess's best row is the judge's, on the first positions."""
        with torch.no_grad():
            found = functional.linear(guess[:most].to(self._head.dtype), self._head).argmax(-1)
            return (found == self.best[:most]).float().mean()


class _LogSum(torch.autograd.Function):
    """log sum exp of a guess's logits, keeping no more than the logits' law for the way back."""

    @staticmethod
    def forward(ctx: Any, guess: Tensor, head: Tensor) -> Tensor:
        logits = functional.linear(guess, head)
        distribution = logits.log_softmax(-1, dtype=torch.float32)
        ctx.save_for_backward(distribution, head)
        return logits[:, 0].float() - distribution[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        distribution, head = ctx.saved_tensors
        return distribution.exp().mul_(gradients[0][:, None]).to(head.dtype) @ head, None
